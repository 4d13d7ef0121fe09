"""Fifteen marked steps; the first one waits 700 ms in the middle, the others keep the GPU busy."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Step 0 is slow (first use of its kernels); the other 14 steps keep the GPU busy and have no fault.",
    "cause": "start-up",
    "also": [],
    "never": ["launch-bound", "host-python", "data-loading"],
    "healthy": False,
}

m = Machine(2, gpu="NVIDIA A100-SXM4-80GB")
model = Transformer(m, layers=6, d=1536, names=False, shapes=False)
for step in range(15):
    with m.step():
        model.forward(between=lambda layer, step=step: m.host(350e3) if step == 0 and layer < 2 else None)
        model.loss()
        model.backward()
        model.optimizer()
        m.synchronize()
write(m, "trace.json.gz", python=False)
