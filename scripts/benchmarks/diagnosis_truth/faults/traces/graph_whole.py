"""An nsys export in which the kernels of a training step lie in a CUDA graph that was recorded as a whole."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "The kernels lie in CUDA graphs recorded as a whole; record with --cuda-graph-trace=node to see them.",
    "cause": "graph-recorded-whole",
    "also": [],
    "never": ["launch-bound", "host-python"],
    "healthy": False,
}

m = Machine(6)
model = Transformer(m, layers=6)
for _ in range(10):
    m.call("cudaGraphLaunch", 11.0)
    graph, start = m.correlation, m.now
    model.train()
    for event in m.events:
        if event.kind == "kernel" and event.data["graph"] is None:
            event.correlation, event.data["graph"] = graph, 1
    m.events = [e for e in m.events if e.kind == "kernel" or e.start < start]
    m.now = start
    m.pending.clear()
m.synchronize()
m.kernel("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)", 3.0)
write(m, "graph_whole.sqlite", whole_graphs=True)
