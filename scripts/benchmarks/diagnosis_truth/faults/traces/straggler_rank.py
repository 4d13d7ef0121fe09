"""Four ranks of DDP; the GPU of rank 2 is slower by a third."""

from _kineto import write_ranks
from _machine import Machine, collective, step_of
from _model import Transformer

CASE = {
    "truth": "Rank 2 computes a third longer than the others, which wait for it in each all-reduce.",
    "cause": "straggler",
    "also": ["exposed-communication"],
    "never": ["launch-bound", "data-loading", "small-buckets", "expert-imbalance"],
    "healthy": False,
}

ranks = [Machine(60, rank=rank, world=4) for rank in range(4)]
models = [Transformer(m, layers=6, d=1536, tokens=8192, rate=0.7 if m.rank == 2 else 1.0) for m in ranks]
for _ in range(4):
    with step_of(ranks):
        for m, model in zip(ranks, models, strict=True):
            model.forward()
            model.loss()
            model.backward()
        ready = [m.free[7] for m in ranks]
        for part in range(4):
            after = [r - (3 - part) * 1500 for r in ready]
            ends = collective(ranks, "all_reduce", 1.0e8, 620.0, after=after, wait=part == 3)
        for m, model in zip(ranks, models, strict=True):
            model.optimizer()
            m.item()
write_ranks(ranks)
