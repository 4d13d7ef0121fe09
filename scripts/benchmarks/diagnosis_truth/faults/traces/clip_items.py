"""Gradients are clipped by hand: the norm of each of 120 parameters is read with .item()."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "120 .item() calls per step, one per parameter while clipping, make the host wait and the GPU idle between them.",
    "cause": "host-sync",
    "also": ["launch-bound"],
    "never": ["data-loading", "pageable-copies"],
    "healthy": False,
}

m = Machine(7)
model = Transformer(m, layers=6, d=1024, tokens=8192)
for _ in range(4):
    with m.step():
        model.forward()
        model.loss()
        model.backward()
        with m.range("clip_grads"):
            for _ in range(120):
                m.kernel(
                    "void at::native::reduce_kernel<512, 1, NormTwoOps>(ReduceOp)", 4.0, op="aten::linalg_vector_norm"
                )
                m.item()
        model.optimizer()
write(m, "trace.json", python=False)
