"""The loader needs 12 ms, but on time: the host is ahead and the copy runs on a stream of its own."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The time in the loader is hidden: the host runs ahead, the copies have their own stream, and the GPU is busy.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "exposed-copies", "launch-bound", "host-python"],
    "healthy": True,
}

m = Machine(83)
model = Transformer(m, layers=3, d=6144, tokens=4096, heads=48)
for step in range(6):
    with m.step():
        with m.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            m.host(12e3)
        copied = m.copy("HtoD", 8e6, stream=21)
        m.wait(copied)
        model.train()
        if step == 5:
            m.synchronize()
write(m, "trace.json.gz", python=False)
