"""CUDA_LAUNCH_BLOCKING=1 was left in the environment: each launch returns when its kernel has ended."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Every cudaLaunchKernel lasts until its kernel has ended (CUDA_LAUNCH_BLOCKING=1), so no launch overlaps a kernel.",
    "cause": "blocking-call",
    "also": ["host-sync", "launch-bound"],
    "never": ["data-loading", "start-up"],
    "healthy": False,
}

m = Machine(24, op=8.0)
m.blocking_launches = True
model = Transformer(m, layers=8, d=768, tokens=2048, sequence=512, heads=12)
for _ in range(4):
    with m.step():
        model.train()
write(m, "trace.json", python=False)
