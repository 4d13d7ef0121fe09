"""Two ranks over a slow network: the all-reduce of the gradients lasts longer than the backward that could hide it."""

from _kineto import write_ranks
from _machine import Machine, collective, step_of
from _model import Transformer

CASE = {
    "truth": "After backward both ranks wait for the all-reduce of the gradients, half of the step, on a slow network.",
    "cause": "exposed-communication",
    "also": [],
    "never": ["straggler", "launch-bound", "data-loading", "small-buckets", "host-sync"],
    "healthy": False,
}

ranks = [Machine(61, rank=rank, world=2) for rank in range(2)]
models = [Transformer(m, layers=6, d=1536, tokens=4096) for m in ranks]
for _ in range(4):
    with step_of(ranks):
        for m, model in zip(ranks, models, strict=True):
            model.forward()
            model.loss()
            model.backward()
        ready = [m.free[7] for m in ranks]
        for part in range(5):
            collective(ranks, "all_reduce", 1.0e8, 5200.0, after=[r - (4 - part) * 1900 for r in ready], wait=part == 4)
        for m, model in zip(ranks, models, strict=True):
            model.optimizer()
            m.synchronize()
write_ranks(ranks)
