"""In one of six steps the state is copied to the CPU and written with torch.save."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "One step of six writes a checkpoint: 150 copies to the host and 420 ms in torch.save while the GPU idles.",
    "cause": "checkpoint-writing",
    "also": ["periodic-pause", "pageable-copies"],
    "never": ["launch-bound", "data-loading", "start-up"],
    "healthy": False,
}

m = Machine(28)
model = Transformer(m, layers=6, d=1536, tokens=4096)
for step in range(6):
    with m.step():
        model.train()
        if step == 3:
            with m.python("train.py(140): save_checkpoint"), m.python("torch/serialization.py(921): save"):
                for _ in range(150):
                    m.copy("DtoH", 1.2e7, pinned=False)
                m.host(4.2e5, "torch/serialization.py(1158): _save")
        m.synchronize()
write(m, "trace.json.gz")
