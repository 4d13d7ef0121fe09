"""Pinned batches of 900 MB are copied on the compute stream: the call does not block, but every kernel waits behind it."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "A copy of 900 MB from pinned memory lies on the compute stream before each forward, 17 ms that nothing hides.",
    "cause": "exposed-copies",
    "also": ["data-loading"],
    "never": ["launch-bound", "pageable-copies", "host-python"],
    "healthy": False,
}

m = Machine(26)
model = Transformer(m, layers=5, d=1536, tokens=4096)
for _ in range(6):
    with m.step():
        m.copy("HtoD", 9e8)
        model.train()
        m.item()
write(m, "trace.json.gz", python=False)
