"""After each step the logits of the batch go to the CPU with .cpu(), for a metric."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Each step copies 130 MB of logits to pageable memory with .cpu(): 20 ms in which the GPU does nothing else.",
    "cause": "pageable-copies",
    "also": ["host-sync", "exposed-copies", "logging"],
    "never": ["launch-bound", "data-loading"],
    "healthy": False,
}

m = Machine(20)
model = Transformer(m, layers=6, d=1024, tokens=4096, vocabulary=16000)
for _ in range(5):
    with m.step():
        model.forward()
        with m.op("aten::to"), m.op("aten::_to_copy"):
            m.copy("DtoH", 4096 * 16000 * 2, pinned=False)
        model.loss()
        model.backward()
        model.optimizer()
write(m, "trace.json", python=False)
