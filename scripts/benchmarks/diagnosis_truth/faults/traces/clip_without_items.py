"""The same as clip_items, without a read: the host runs ahead, and the GPU has no gaps."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The norms of 120 parameters stay on the GPU; the host runs ahead and nothing waits.",
    "cause": None,
    "also": ["elementwise-chain"],
    "never": ["host-sync", "launch-bound"],
    "healthy": True,
}

m = Machine(7)
model = Transformer(m, layers=6, d=1024, tokens=8192)
for step in range(4):
    with m.step():
        model.forward()
        model.loss()
        model.backward()
        with m.range("clip_grads"):
            for _ in range(120):
                m.kernel(
                    "void at::native::reduce_kernel<512, 1, NormTwoOps>(ReduceOp)", 4.0, op="aten::linalg_vector_norm"
                )
        model.optimizer()
        if step == 3:
            m.synchronize()
write(m, "trace.json", python=False)
