"""Mixed precision, but the output layer is kept out of autocast and multiplies in fp32."""

from _kineto import write
from _machine import Machine
from _model import GEMM, Transformer

CASE = {
    "truth": "The vocabulary projection alone runs in fp32 without tensor cores, and its three products take more than 40% of the step.",
    "cause": "fp32-products",
    "also": ["slow-products", "logits"],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(43)
model = Transformer(m, layers=12, d=1024, tokens=8192)
T, D, V = 8192, 1024, 16000
us = 2 * T * D * V / 47e6


def head(op: str) -> None:
    m.kernel(GEMM["fp32"], us, op=op, dims=[[T, D], [D, V]], block=(256, 1, 1))


for _ in range(4):
    with m.step():
        model.forward(head=False)
        with m.range("lm_head_fp32"):
            head("aten::mm")
        model.loss()
        with m.backward(), m.node("MmBackward0", m.sequence):
            head("aten::mm")
            head("aten::mm")
        model.backward()
        model.optimizer()
        m.item()
write(m, "trace.json.gz", python=False)
