"""A plain CUDA program that runs one kernel named softmax_rows, back to back."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "One kernel, softmax_rows, keeps the GPU busy; there is no attention and no PyTorch operator.",
    "cause": None,
    "also": [],
    "never": ["unfused-attention", "launch-bound"],
    "healthy": True,
}

m = Machine(5)
for _ in range(40):
    m.kernel("softmax_rows(float const*, float*, int)", 990.0)
m.synchronize()
write(m, "softmax.json", python=False, properties=False)
