"""The inputs came from NumPy, so the model was made double."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The whole model computes in float64: its products are double precision and take three quarters of the time.",
    "cause": "fp64-products",
    "also": ["fp32-products", "slow-products", "unfused-attention"],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(44)
model = Transformer(m, layers=4, d=768, tokens=4096, heads=12, dtype="fp64", attention="naive", sequence=512)
for _ in range(3):
    with m.step():
        model.train()
        m.item()
write(m, "trace.json", python=False)
