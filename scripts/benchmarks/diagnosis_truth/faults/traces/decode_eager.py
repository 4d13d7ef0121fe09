"""Generation token by token in eager mode: no backward, products with one row, GPU busy a fifth of the time."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Each of 24 decoded tokens launches hundreds of 3 µs kernels; the GPU waits for the launches.",
    "cause": "launch-bound",
    "also": [],
    "never": ["host-sync", "data-loading", "unfused-optimizer"],
    "healthy": False,
}

m = Machine(10, op=9.0)
model = Transformer(m, layers=16, d=1024, tokens=1, heads=16, sequence=128, vocabulary=32000, names=False)
for _ in range(24):
    with m.range("decode"):
        model.forward()
        m.kernel("void at::native::reduce_kernel<512, 1, ArgMaxOps>(ReduceOp)", 9.0, op="aten::argmax", grid=(1, 1, 1))
m.synchronize()
write(m, "decode.json.gz", python=False)
