"""Training in fp32 with TF32 off on an H100."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "All matrix products run in fp32 without tensor cores and take 90% of the GPU's time.",
    "cause": "fp32-products",
    "also": ["unfused-attention", "slow-products"],
    "never": ["launch-bound", "data-loading"],
    "healthy": False,
}

m = Machine(42)
model = Transformer(m, layers=4, d=1024, tokens=4096, dtype="fp32", heads=16)
for _ in range(3):
    with m.step():
        model.train()
        m.item()
write(m, "trace.json", python=False)
