"""An eager model with activations and norms written as chains of elementwise operations."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Elementwise kernels, nine per activation, take more than half of the GPU's time; it is busy throughout.",
    "cause": "elementwise-chain",
    "also": [],
    "never": ["launch-bound", "host-sync", "data-loading", "fp32-products"],
    "healthy": False,
}

m = Machine(40)
model = Transformer(m, layers=6, d=512, tokens=32768, heads=8, sequence=512, vocabulary=8000, pointwise_kernels=9)
for _ in range(4):
    with m.step():
        model.train()
        m.item()
write(m, "trace.json.gz", python=False)
