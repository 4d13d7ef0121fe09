"""Optimizer state on the CPU: gradients travel down, CPUAdam updates, weights travel up."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The update runs on the CPU (DeepSpeed's CPUAdam) while the GPU idles: two thirds of each step.",
    "cause": "cpu-offload",
    "also": ["host-python", "exposed-copies"],
    "never": ["launch-bound", "data-loading", "host-sync", "unfused-optimizer"],
    "healthy": False,
}

m = Machine(57)
model = Transformer(m, layers=6, d=2048, tokens=8192)
for _ in range(3):
    with m.step():
        model.forward()
        model.loss()
        model.backward()
        with m.range("Optimizer.step#DeepSpeedCPUAdam.step"):
            for _ in range(12):
                m.copy("DtoH", 6e7)
            m.synchronize("stream")
            with m.python("deepspeed/ops/adam/cpu_adam.py(97): step"):
                m.host(58e3)
            for _ in range(12):
                m.copy("HtoD", 3e7)
        m.synchronize()
write(m, "trace.json.gz")
