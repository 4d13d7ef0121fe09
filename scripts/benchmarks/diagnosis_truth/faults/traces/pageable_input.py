"""Video batches of 190 MB go to the GPU from pageable memory."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "Each step copies 190 MB from pageable memory, 30 ms during which the host is blocked and the GPU computes nothing.",
    "cause": "pageable-copies",
    "also": ["exposed-copies", "data-loading"],
    "never": ["launch-bound", "host-python"],
    "healthy": False,
}

m = Machine(25, ranges="step")
model = Transformer(m, layers=6, d=1024, tokens=8192)
for _ in range(6):
    with m.step():
        with m.range("to_device"):
            m.copy("HtoD", 1.9e8, pinned=False)
        model.train()
        m.item()
write(m, "report.sqlite")
