"""Ten steps; after the fifth and the tenth the model is evaluated on 30 batches."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Evaluation after every fifth step takes more time than the training steps between; both keep the GPU busy.",
    "cause": "evaluation",
    "also": [],
    "never": ["launch-bound", "data-loading", "start-up", "host-sync"],
    "healthy": False,
}

m = Machine(27)
model = Transformer(m, layers=4, d=1536, tokens=4096)
for step in range(10):
    with m.step():
        model.train()
        if step % 5 == 4:
            with m.range("evaluate"):
                for _ in range(30):
                    model.forward()
                    model.loss()
                m.item()
write(m, "trace.json.gz", python=False)
