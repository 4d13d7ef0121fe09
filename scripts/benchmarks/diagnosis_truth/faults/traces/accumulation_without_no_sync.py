"""Four micro-batches per step under DDP, and each backward reduces all gradients."""

from _kineto import write
from _machine import Machine, collective
from _model import Transformer

CASE = {
    "truth": "The gradients are all-reduced in each of four micro-batches although the optimizer steps once: no_sync() is missing.",
    "cause": "no-sync-missing",
    "also": ["exposed-communication"],
    "never": ["launch-bound", "data-loading", "host-sync", "straggler"],
    "healthy": False,
}

m = Machine(65, rank=1, world=4)
model = Transformer(m, layers=4, d=2048, tokens=2048, sequence=1024)
for _ in range(3):
    with m.step():
        for _ in range(4):
            with m.range("DistributedDataParallel.forward"):
                model.forward()
            model.loss()
            model.backward()
            for part in range(3):
                collective([m], "all_reduce", 1.8e8, 2900.0, wait=part == 2)
        model.optimizer()
        m.item()
write(m, "rank1.json.gz", python=False)
