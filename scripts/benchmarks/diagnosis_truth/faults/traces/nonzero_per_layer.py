"""Each layer selects its active tokens with nonzero, so that the host waits for the GPU once per layer."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "aten::nonzero in each layer makes the host wait, so the launches after it come late and the GPU has gaps.",
    "cause": "host-sync",
    "also": ["launch-bound"],
    "never": ["data-loading", "host-python", "expert-imbalance"],
    "healthy": False,
}

m = Machine(17, op=5.0)
model = Transformer(m, layers=16, d=768, tokens=4096, sequence=512, heads=12)


def select(layer: int) -> None:
    with m.op("aten::nonzero"):
        m.kernel(
            "void at_cuda_detail::cub::DeviceReduceSingleTileKernel<Policy800, bool*, int*>(bool*)", 3.0, grid=(1, 1, 1)
        )
        m.copy("DtoH", 4, op=None)
        m.events[-1].name, m.events[-1].data["pinned"] = "Memcpy DtoH (Device -> Pageable)", False
        m.synchronize("stream")
        m.host(170.0)
        m.kernel("void at_cuda_detail::cub::DeviceSelectSweepKernel<Policy800, long*>(long*)", 5.0)


for _ in range(4):
    with m.step():
        model.forward(between=select)
        model.loss()
        model.backward()
        model.optimizer()
write(m, "trace.json", python=False)
