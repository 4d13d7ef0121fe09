"""The trace of one rank of eight: the gradients are reduced in one call after backward, and nothing overlaps it."""

from _kineto import write
from _machine import Machine, collective
from _model import Transformer

CASE = {
    "truth": "A single all-reduce of all gradients begins after backward and takes 40% of the step; nothing overlaps it.",
    "cause": "exposed-communication",
    "also": [],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(62, rank=3, world=8)
model = Transformer(m, layers=6, d=1536, tokens=8192)
for _ in range(5):
    with m.step():
        model.forward()
        model.loss()
        model.backward()
        collective([m], "all_reduce", 4.4e8, 18e3)
        model.optimizer()
        m.item()
write(m, "worker3.json.gz", python=False)
