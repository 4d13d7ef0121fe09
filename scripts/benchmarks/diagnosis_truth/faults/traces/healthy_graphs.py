"""CUDA graphs with nodes that were recorded one by one: small kernels, and no gaps between them."""

from _machine import Machine
from _nsys import write

CASE = {
    "truth": "A CUDA graph of 300 kernels of 8 to 20 µs is replayed without gaps; the launch costs one call per step.",
    "cause": None,
    "also": ["elementwise-chain"],
    "never": ["launch-bound", "graph-recorded-whole", "host-sync"],
    "healthy": True,
}

m = Machine(88, ranges="step")
for _ in range(20):
    with m.step():
        m.call("cudaGraphLaunch", 14.0)
        graph, now = m.correlation, m.now
        for node in range(150):
            m.kernel("nvjet_tst_64x64_64x16_2x1_v_bz_TNT", 20.0, graph=node)
            m.kernel("triton_per_fused_add_layer_norm_0", 8.0, graph=150 + node)
        m.events = [e for e in m.events if not (e.kind == "call" and e.start >= now)]
        for event in m.events:
            if event.kind == "kernel" and event.correlation > graph:
                event.correlation = graph
        m.now = now
        m.pending.clear()
        m.synchronize("stream")
write(m, "graphs.sqlite")
