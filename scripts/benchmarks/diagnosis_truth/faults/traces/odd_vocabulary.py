"""A vocabulary of 50257 makes the products of the output layer misaligned."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The output layer's size of 50257 is odd: its bf16 products run at an eighth of the rate of the others, two thirds of the step.",
    "cause": "slow-products",
    "also": ["logits"],
    "never": ["launch-bound", "data-loading", "fp32-products"],
    "healthy": False,
}

m = Machine(45)
model = Transformer(m, layers=12, d=768, tokens=8192, heads=12, vocabulary=50257)
T, D, V = 8192, 768, 50257
us = 2 * T * D * V / 620e6 * 8


def head(first: tuple[int, int], second: tuple[int, int]) -> None:
    name = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align1>(Params)"
    m.kernel(name, us, op="aten::mm", dims=[list(first), list(second)], grid=(3144, 64, 1), block=(128, 1, 1))


for _ in range(3):
    with m.step():
        model.forward(head=False)
        head((T, D), (D, V))
        model.loss()
        with m.backward(), m.node("MmBackward0", m.sequence):
            head((T, V), (V, D))
            head((V, T), (T, D))
        model.backward()
        model.optimizer()
        m.item()
write(m, "trace.json.gz", python=False)
