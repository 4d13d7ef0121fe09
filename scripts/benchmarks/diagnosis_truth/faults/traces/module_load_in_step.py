"""A branch of the model that runs for the first time in the third of eight steps loads its module and compiles with NVRTC."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "One of eight steps loads a CUDA module for 240 ms, as a kernel is used for the first time; the others are busy.",
    "cause": "start-up",
    "also": ["blocking-call"],
    "never": ["launch-bound", "data-loading"],
    "healthy": False,
}

m = Machine(3, ranges="step")
model = Transformer(m, layers=6, d=2048, tokens=4096)
for step in range(8):
    with m.step():
        model.forward(
            between=lambda layer, step=step: m.call("cuModuleLoadData", 2.4e5) if (step, layer) == (2, 3) else 0
        )
        model.loss()
        model.backward()
        model.optimizer()
        m.item()
m.synchronize()
write(m, "report.sqlite")
