"""A custom autograd.Function computes part of its gradient in NumPy-free Python: autograd's thread is the one that is slow."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "In backward, MyQuantizer.backward runs 2.1 ms of Python per layer in autograd's thread; the GPU idles meanwhile.",
    "cause": "host-python",
    "also": ["launch-bound"],
    "never": ["data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(13)
model = Transformer(m, layers=8, d=1024, tokens=4096)


def quantize(layer: int) -> None:
    with m.node("MyQuantizerBackward", 90 + layer), m.python("quant.py(41): backward"):
        m.host(2100.0)


for _ in range(4):
    with m.step():
        model.forward()
        model.loss()
        model.backward(after_layer=quantize)
        model.optimizer()
write(m, "trace.json")
