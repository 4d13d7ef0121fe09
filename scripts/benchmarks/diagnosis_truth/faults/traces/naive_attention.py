"""Attention by products, mask and softmax, with 4096 positions."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Attention writes its scores to memory; its products, division, mask and softmax take most of the GPU's time.",
    "cause": "unfused-attention",
    "also": ["elementwise-chain", "score-matrices"],
    "never": ["launch-bound", "data-loading", "host-sync", "fp32-products"],
    "healthy": False,
}

m = Machine(49)
model = Transformer(m, layers=6, d=1024, tokens=8192, heads=16, sequence=4096, attention="naive")
for _ in range(4):
    with m.step():
        model.train()
        m.item()
write(m, "trace.json.gz", python=False)
