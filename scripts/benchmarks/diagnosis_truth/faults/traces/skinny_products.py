"""Adapters of rank 3: the products with them use a fraction of the chip."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The small products of the adapters (rank 3, no alignment) take longer than the large ones: 60% of the step.",
    "cause": "slow-products",
    "also": ["low-occupancy"],
    "never": ["launch-bound", "data-loading", "fp32-products"],
    "healthy": False,
}

m = Machine(46)
model = Transformer(m, layers=6, d=1024, tokens=8192)


def adapters(layer: int) -> None:
    name = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_nn_align1>(Params)"
    for first, second in (([8192, 1024], [1024, 3]), ([8192, 3], [3, 1024])) * 4:
        m.kernel(name, 220.0, op="aten::mm", dims=[first, second], grid=(512, 1, 1), block=(32, 1, 1))


for _ in range(4):
    with m.step():
        model.forward(between=adapters)
        model.loss()
        model.backward(after_layer=adapters)
        model.optimizer()
        m.item()
write(m, "trace.json.gz", python=False)
