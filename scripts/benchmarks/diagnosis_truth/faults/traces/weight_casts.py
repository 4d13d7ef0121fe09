"""Autocast's cache is off: each use of a weight converts it from fp32 again, in each of four micro-batches."""

from _kineto import write
from _machine import Machine
from _model import Transformer, moved

CASE = {
    "truth": "Copies of fp32 weights to bf16, once per use and micro-batch, take 30% of the GPU's time.",
    "cause": "casts",
    "also": ["elementwise-chain"],
    "never": ["launch-bound", "data-loading", "host-sync", "fp32-products"],
    "healthy": False,
}

m = Machine(54)
model = Transformer(m, layers=4, d=3072, tokens=1024, heads=24, sequence=1024, vocabulary=16000)
CAST = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(TensorIteratorBase&)>(int)"
)


def cast(layer: int) -> None:
    for size in (3, 1, 4, 4):
        with m.op("aten::to"), m.op("aten::_to_copy"):
            m.kernel(CAST, moved(size * 3072**2 * 6) * 1.4, op="aten::copy_")


for _ in range(2):
    with m.step():
        for _ in range(4):
            model.forward(between=cast)
            model.loss()
            model.backward(after_layer=cast)
        model.optimizer()
        m.item()
write(m, "trace.json.gz", python=False)
