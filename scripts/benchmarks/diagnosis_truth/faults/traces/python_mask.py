"""Each step builds its attention mask in a Python loop before the forward."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Before each forward, build_mask in train.py spends 19 ms in Python while the GPU has nothing to do.",
    "cause": "host-python",
    "also": [],
    "never": ["launch-bound", "host-sync", "fp32-products"],
    "healthy": False,
}

m = Machine(11)
model = Transformer(m, layers=6, d=1536, tokens=4096)
for _ in range(5):
    with m.step():
        with m.python("train.py(88): build_mask"):
            m.host(19e3)
            m.copy("HtoD", 4e6)
        model.train()
        m.synchronize()
write(m, "trace.json.gz")
