"""A small transformer with a batch of one: every kernel lasts 2 to 6 µs, every launch 8 to 12."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The GPU is busy for about a third of the step; it waits for launches, as the kernels last only a few microseconds.",
    "cause": "launch-bound",
    "also": ["unfused-optimizer"],
    "never": ["data-loading", "host-sync", "fp32-products"],
    "healthy": False,
}

m = Machine(8, op=6.0)
model = Transformer(m, layers=12, d=384, tokens=256, heads=6, sequence=256, vocabulary=8000)
for _ in range(6):
    with m.step():
        model.train()
write(m, "trace.json.gz", python=False)
