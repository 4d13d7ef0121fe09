"""A pipeline of three stages with two micro-batches per step: each rank is idle for most of it."""

from _kineto import write_ranks
from _machine import Machine, step_of, transfer
from _model import Transformer

CASE = {
    "truth": "With two micro-batches on three stages each rank waits for its neighbours 40% of the time: the pipeline's bubble.",
    "cause": "pipeline-bubble",
    "also": ["exposed-communication"],
    "never": ["launch-bound", "data-loading", "straggler", "expert-imbalance", "host-sync"],
    "healthy": False,
}

ranks = [Machine(67, rank=rank, world=3) for rank in range(3)]
stages = [Transformer(m, layers=4, d=1536, tokens=4096, vocabulary=4096) for m in ranks]
for _ in range(3):
    with step_of(ranks):
        tapes: dict[tuple[int, int], list] = {}
        for batch in range(2):
            for stage in range(3):
                if stage:
                    transfer(ranks[stage - 1], ranks[stage], 1.2e7, 60.0)
                stages[stage].forward()
                tapes[batch, stage] = stages[stage].tape
        for batch in range(2):
            for stage in (2, 1, 0):
                if stage < 2:
                    transfer(ranks[stage + 1], ranks[stage], 1.2e7, 60.0, stream=28)
                stages[stage].tape = tapes[batch, stage]
                stages[stage].backward()
        for m, stage in zip(ranks, stages, strict=True):
            stage.optimizer()
            m.synchronize()
write_ranks(ranks)
