"""Under nsys: every fourth iteration has a range save of 300 ms."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "Every fourth iteration spends 300 ms in its range save_checkpoint, longer than the four iterations' own work.",
    "cause": "checkpoint-writing",
    "also": ["periodic-pause"],
    "never": ["launch-bound", "data-loading", "start-up", "host-sync"],
    "healthy": False,
}

m = Machine(29, ranges="iteration")
model = Transformer(m, layers=6, d=1536, tokens=8192)
for step in range(12):
    with m.step():
        model.train()
        if step % 4 == 3:
            with m.range("save_checkpoint"):
                m.copy("DtoH", 4e8, blocking=True)
                m.host(3e5)
write(m, "run.sqlite")
