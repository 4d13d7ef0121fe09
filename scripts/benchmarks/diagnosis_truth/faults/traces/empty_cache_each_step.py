"""The loop calls torch.cuda.empty_cache() after every step, so each forward asks CUDA for its memory again."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Memory is given back (cudaFree) and requested again (cudaMalloc) in every step; the GPU waits for these calls.",
    "cause": "device-allocation",
    "also": ["blocking-call", "host-sync"],
    "never": ["launch-bound", "data-loading"],
    "healthy": False,
}

m = Machine(21)
model = Transformer(m, layers=12, d=1024, tokens=4096)


def request(layer: int) -> None:
    for _ in range(3):
        m.call("cudaMalloc", m.about(420.0))


for _ in range(4):
    with m.step():
        model.forward(between=request)
        model.loss()
        model.backward()
        model.optimizer()
        m.synchronize()
        for _ in range(36):
            m.call("cudaFree", m.about(230.0))
write(m, "trace.json.gz", python=False)
