"""A mid-sized model in eager mode under nsys: 55 to 70% of the step on the GPU, the rest between kernels."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "Between its kernels the GPU waits for launches, a third of the step, evenly in forward and backward.",
    "cause": "launch-bound",
    "also": ["elementwise-chain"],
    "never": ["data-loading", "host-sync", "blocking-call"],
    "healthy": False,
}

m = Machine(9, op=14.0, ranges="step")
model = Transformer(m, layers=16, d=768, tokens=2048, heads=12, sequence=512, vocabulary=16000)
for _ in range(5):
    with m.step():
        model.train()
write(m, "report.sqlite")
