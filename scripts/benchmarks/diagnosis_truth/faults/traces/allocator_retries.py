"""Memory is nearly full: the allocator frees its cached blocks and asks again, several times per step."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "The caching allocator retries: cudaFree and cudaMalloc in the middle of each backward stop the GPU for 9 ms.",
    "cause": "device-allocation",
    "also": ["blocking-call", "host-sync", "fragmentation"],
    "never": ["launch-bound", "data-loading", "host-python"],
    "healthy": False,
}

m = Machine(22, ranges="step")
model = Transformer(m, layers=6, d=1536, tokens=4096)


def retry(layer: int) -> None:
    if layer in (4, 1):
        m.synchronize()
        for _ in range(9):
            m.call("cudaFree", m.about(310.0))
        for _ in range(3):
            m.call("cudaMalloc", m.about(560.0))


for _ in range(6):
    with m.step():
        model.forward()
        model.loss()
        model.backward(after_layer=retry)
        model.optimizer()
write(m, "report.sqlite")
