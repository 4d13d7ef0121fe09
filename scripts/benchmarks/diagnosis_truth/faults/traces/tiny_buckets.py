"""Gradients are reduced one tensor at a time: 300 all-reduces of 20 to 60 µs, each at its latency."""

from _kineto import write_ranks
from _machine import Machine, collective, step_of
from _model import Transformer

CASE = {
    "truth": "Each of 240 gradients has an all-reduce of its own, at 55 µs of latency for 100 kB; bucketing would save most of it.",
    "cause": "small-buckets",
    "also": ["exposed-communication", "launch-bound"],
    "never": ["straggler", "data-loading", "host-sync"],
    "healthy": False,
}

ranks = [Machine(64, rank=rank, world=2) for rank in range(2)]
models = [Transformer(m, layers=10, d=512, tokens=4096, heads=8, sequence=512, vocabulary=8000) for m in ranks]
for _ in range(3):
    with step_of(ranks):
        for m, model in zip(ranks, models, strict=True):
            model.forward()
            model.loss()
            model.backward()
        for _ in range(240):
            collective(ranks, "all_reduce", 1.0e5, 55.0)
        for m, model in zip(ranks, models, strict=True):
            model.optimizer()
            m.item()
write_ranks(ranks)
