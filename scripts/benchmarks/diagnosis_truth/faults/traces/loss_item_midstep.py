"""The loss is printed with .item() between forward and backward of a mid-sized model, so backward begins on an empty queue."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "loss.item() between forward and backward drains the queue; the logging after it leaves the GPU idle for 3.4 ms.",
    "cause": "host-sync",
    "also": ["host-python", "logging"],
    "never": ["data-loading", "fp32-products", "start-up"],
    "healthy": False,
}

m = Machine(19, op=6.0)
model = Transformer(m, layers=6, d=1024, tokens=4096)
for _ in range(6):
    with m.step():
        model.forward()
        model.loss()
        for _ in range(4):
            m.item()
            m.host(850.0)
        model.backward()
        model.optimizer()
write(m, "trace.json.gz", python=False)
