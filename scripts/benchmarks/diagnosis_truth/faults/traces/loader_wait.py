"""The worker processes of the data loader are too slow: each step waits for its batch."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Each step waits about 55 ms in the data loader's __next__ and then trains for 20 ms.",
    "cause": "data-loading",
    "also": [],
    "never": ["launch-bound", "host-python", "host-sync", "pageable-copies"],
    "healthy": False,
}

m = Machine(14)
model = Transformer(m, layers=8, d=1024, tokens=8192)
for step in range(6):
    with m.step():
        with m.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            m.host(55e3 + 9e3 * (step % 3))
        m.copy("HtoD", 3e5)
        model.train()
        m.synchronize()
write(m, "trace.json.gz", python=False)
