"""The same kind of optimizer under nsys, in its own range; the rest of the step keeps the GPU busy."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "The optimizer's range, about 40% of the step, is hundreds of small kernels, one per tensor and operation.",
    "cause": "unfused-optimizer",
    "also": ["launch-bound", "elementwise-chain"],
    "never": ["data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(48, op=4.0, ranges="step")
model = Transformer(m, layers=24, d=768, tokens=6144, heads=12, sequence=512, vocabulary=8000)
for _ in range(4):
    with m.step():
        model.forward()
        model.loss()
        model.backward()
        with m.range("optimizer"):
            model.optimizer("loop")
        m.item()
write(m, "report.sqlite")
