"""Under nsys, the program's own range load_batch takes two thirds of the iteration."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "In the range load_batch, two thirds of each iteration, the GPU has nothing to do.",
    "cause": "data-loading",
    "also": [],
    "never": ["launch-bound", "host-sync"],
    "healthy": False,
}

m = Machine(16, ranges="iteration {}")
model = Transformer(m, layers=4, d=1024, tokens=4096)
for _ in range(12):
    with m.step():
        with m.range("load_batch"):
            m.host(15e3)
        m.copy("HtoD", 2e5)
        model.train()
        m.item()
write(m, "nsys.sqlite")
