"""An optimizer written as a loop over parameters: thousands of kernels of 3 to 30 µs."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Adam runs tensor by tensor, 8 kernels for each of 386 tensors; the optimizer takes more than half of the step.",
    "cause": "unfused-optimizer",
    "also": ["launch-bound", "elementwise-chain"],
    "never": ["data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(47, op=5.0)
model = Transformer(m, layers=32, d=512, tokens=4096, heads=8, sequence=512, vocabulary=8000)
for _ in range(3):
    with m.step():
        model.forward()
        model.loss()
        model.backward()
        model.optimizer("loop")
        m.item()
write(m, "trace.json.gz", python=False)
