"""The same kind of attention in a vision transformer under nsys, without ranges of its own."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "Unfused attention (products, division, softmax with the scores in memory) takes 55% of the kernels' time.",
    "cause": "unfused-attention",
    "also": ["elementwise-chain", "score-matrices"],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(50, ranges="batch")
model = Transformer(
    m, layers=8, d=768, tokens=16384, heads=12, sequence=1024, attention="naive", vocabulary=1000, names=False
)
for _ in range(4):
    with m.step():
        model.train()
        m.item()
write(m, "vit.sqlite")
