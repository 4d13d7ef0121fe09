"""FSDP with prefetching: each all-gather runs while the layer before it computes."""

from _kineto import write
from _machine import Machine, collective
from _model import Transformer

CASE = {
    "truth": "The all-gathers of the next layer and the reduce-scatters run beside the computation, which never waits.",
    "cause": None,
    "also": [],
    "never": ["exposed-communication", "launch-bound", "host-sync"],
    "healthy": True,
}

m = Machine(90, rank=0, world=8)
model = Transformer(m, layers=5, d=6144, tokens=8192, heads=48)


def prefetch(layer: int) -> None:
    collective(
        [m], "all_gather", 9.0e8, 2600.0, op="c10d::_allgather_base_", after=[m.free.get(7, 0) - 3600], wait=False
    )


def scatter(layer: int) -> None:
    collective([m], "reduce_scatter", 9.0e8, 2500.0, op="c10d::_reduce_scatter_base_", wait=False)


for step in range(3):
    with m.step():
        model.forward(between=prefetch)
        model.loss()
        model.backward(before_layer=prefetch, after_layer=scatter)
        model.optimizer()
        if step == 2:
            m.synchronize()
write(m, "rank0.json.gz", python=False)
