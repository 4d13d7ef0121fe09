"""Two ranks; the loader of rank 1 is slow, so that rank 0 waits in the all-reduce."""

from _kineto import write_ranks
from _machine import Machine, collective, step_of
from _model import Transformer

CASE = {
    "truth": "Rank 1 waits 22 ms per step for its data loader, and rank 0 waits for rank 1 in the all-reduce.",
    "cause": "straggler",
    "also": ["data-loading", "exposed-communication"],
    "never": ["launch-bound", "small-buckets", "host-sync"],
    "healthy": False,
}

ranks = [Machine(69, rank=rank, world=2) for rank in range(2)]
models = [Transformer(m, layers=6, d=1024, tokens=8192) for m in ranks]
for _ in range(4):
    with step_of(ranks):
        for m, model in zip(ranks, models, strict=True):
            with m.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
                m.host(22e3 if m.rank == 1 else 160.0)
            model.forward()
            model.loss()
            model.backward()
        collective(ranks, "all_reduce", 1.5e8, 800.0)
        for m, model in zip(ranks, models, strict=True):
            model.optimizer()
            m.synchronize()
write_ranks(ranks)
