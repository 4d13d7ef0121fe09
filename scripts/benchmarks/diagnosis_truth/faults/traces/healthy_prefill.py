"""Inference on long prompts: forward alone, products and flash attention, no backward."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Batches of prompts keep the GPU busy with products and flash attention; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "host-sync", "evaluation", "unfused-optimizer"],
    "healthy": True,
}

m = Machine(82)
model = Transformer(m, layers=6, d=8192, tokens=8192, heads=64, sequence=4096, names=False)
for _ in range(6):
    model.forward()
m.synchronize()
write(m, "prefill.json.gz", python=False)
