"""FSDP without prefetching: each layer's all-gather begins when the layer before it has ended."""

from _kineto import write
from _machine import Machine, collective
from _model import Transformer

CASE = {
    "truth": "Each layer waits for the all-gather of its own weights; none of them overlaps a computation: 40% of the step.",
    "cause": "exposed-communication",
    "also": [],
    "never": ["launch-bound", "data-loading", "host-sync", "small-buckets"],
    "healthy": False,
}

m = Machine(63, rank=0, world=8)
model = Transformer(m, layers=8, d=2048, tokens=4096)


def gather(layer: int) -> None:
    with m.op("FSDP::all_gather"):
        collective([m], "all_gather", 1.0e8, 950.0, op="c10d::_allgather_base_")


def scatter(layer: int) -> None:
    with m.op("FSDP::post_backward_reduce"):
        collective([m], "reduce_scatter", 1.0e8, 900.0, op="c10d::_reduce_scatter_base_")


for _ in range(4):
    with m.step():
        gather(0)
        model.forward(between=lambda layer: gather(layer) if layer < 7 else None)
        model.loss()
        model.backward(before_layer=gather, after_layer=scatter)
        model.optimizer()
        m.item()
write(m, "fsdp_rank0.json.gz", python=False)
