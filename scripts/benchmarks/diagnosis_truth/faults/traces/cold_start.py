"""The recording begins with the first launch of the process, which loads the kernels for 0.9 s; ten steady steps follow."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The first cudaLaunchKernel lasts 0.9 s (lazy loading); the ten steps after it keep the GPU busy.",
    "cause": "start-up",
    "also": [],
    "never": ["launch-bound", "host-python", "data-loading"],
    "healthy": False,
}

m = Machine(1, gpu="NVIDIA A100-SXM4-80GB")
model = Transformer(m, layers=4, names=False, shapes=False)
m.launch_us = 9e5
m.kernel("void at::native::vectorized_elementwise_kernel<4, FillFunctor>(int)", 5.0, op="aten::fill_")
m.launch_us = 4.0
for _ in range(10):
    model.forward()
    model.backward()
    model.optimizer()
m.synchronize()
write(m, "cold_start.json", python=False)
