"""A router in plain Python runs between the layers, 1.4 ms each, in the range that the program marks as route."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "Python in the range route, between the layers, lasts longer than the layer's kernels: the GPU waits for it.",
    "cause": "host-python",
    "also": ["launch-bound"],
    "never": ["data-loading", "host-sync", "blocking-call"],
    "healthy": False,
}

m = Machine(12, ranges="step")
model = Transformer(m, layers=10, d=1024, tokens=4096)


def route(layer: int) -> None:
    with m.range("route"):
        m.host(1400.0)


for _ in range(5):
    with m.step():
        model.forward(between=route)
        model.loss()
        model.backward()
        model.optimizer()
write(m, "moe.sqlite")
