"""The same kind of training under nsys with another size."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "The GPU is busy 98% of each step with large products; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "host-sync", "data-loading"],
    "healthy": True,
}

m = Machine(81, ranges="step")
model = Transformer(m, layers=8, d=5120, tokens=4096, heads=40)
for _ in range(4):
    with m.step():
        model.train()
        m.item()
write(m, "report.sqlite")
