"""The batch is pinned in the main thread in every step: cudaHostAlloc blocks."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "batch.pin_memory() in the main thread calls cudaHostAlloc for 13 ms in each step, and cudaFreeHost for 4.",
    "cause": "blocking-call",
    "also": ["data-loading"],
    "never": ["launch-bound", "host-sync", "device-allocation"],
    "healthy": False,
}

m = Machine(23)
model = Transformer(m, layers=5, d=1024, tokens=4096)
for _ in range(7):
    with m.step():
        with m.op("aten::pin_memory"), m.op("aten::_pin_memory"):
            m.call("cudaHostAlloc", m.about(13e3))
        m.copy("HtoD", 6e7)
        model.train()
        m.synchronize("stream")
        m.call("cudaFreeHost", m.about(4e3))
write(m, "trace.json.gz", python=False)
