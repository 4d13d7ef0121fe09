"""Two ranks of DDP on NVLink: the buckets are reduced while backward goes on, and the last one is short."""

from _kineto import write_ranks
from _machine import Machine, collective, step_of
from _model import Transformer

CASE = {
    "truth": "The all-reduces overlap backward, and the ranks are equally fast; a hundredth of the step is exposed.",
    "cause": None,
    "also": [],
    "never": ["exposed-communication", "straggler", "launch-bound", "small-buckets", "find-unused-parameters"],
    "healthy": True,
}

ranks = [Machine(89, rank=rank, world=2) for rank in range(2)]
models = [Transformer(m, layers=4, d=6144, tokens=4096, heads=48) for m in ranks]
for _ in range(3):
    with step_of(ranks):
        for m, model in zip(ranks, models, strict=True):
            model.forward()
            model.loss()
            model.backward()
        ready = [m.free[7] for m in ranks]
        for part in range(6):
            collective(
                ranks, "all_reduce", 6.0e8, 2100.0, after=[r - (5 - part) * 5000 - 1500 for r in ready], wait=part == 5
            )
        for m, model in zip(ranks, models, strict=True):
            model.optimizer()
            m.item()
write_ranks(ranks)
