"""A language model in bf16 with flash attention and a fused optimizer; the host runs ahead."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The GPU is busy 99% of the step, with large bf16 products and flash attention; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "host-sync", "data-loading", "unfused-attention"],
    "healthy": True,
}

m = Machine(80)
model = Transformer(m, layers=4, d=6144, tokens=8192, heads=48)
for _ in range(5):
    with m.step():
        model.train()
        m.item()
write(m, "trace.json.gz", python=False)
