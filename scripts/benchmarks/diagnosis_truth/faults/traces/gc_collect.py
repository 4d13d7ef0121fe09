"""gc.collect() is called after each step, with a large heap."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "gc.collect() after every step stops the host for 26 ms, longer than the host runs ahead of the GPU.",
    "cause": "garbage-collection",
    "also": ["host-python"],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(30)
model = Transformer(m, layers=4, d=1024, tokens=4096)
for _ in range(8):
    with m.step():
        model.train()
        m.item()
        with m.python("train.py(61): cleanup"):
            m.host(26e3, "<built-in function collect>")
write(m, "trace.json.gz")
