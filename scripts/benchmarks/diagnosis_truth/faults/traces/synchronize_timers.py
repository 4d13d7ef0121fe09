"""A home-made timer calls torch.cuda.synchronize() around every layer."""

from _machine import Machine
from _model import Transformer
from _nsys import write

CASE = {
    "truth": "A timer synchronises the device after every layer of the forward; each time the GPU runs dry for the next launches.",
    "cause": "host-sync",
    "also": ["launch-bound"],
    "never": ["data-loading", "host-python"],
    "healthy": False,
}

m = Machine(18, op=4.0, ranges="train_step")
model = Transformer(m, layers=20, d=768, tokens=4096, heads=12, sequence=512, vocabulary=8000)


def timer(layer: int) -> None:
    m.synchronize()
    m.host(60.0)
    m.synchronize()


for _ in range(5):
    with m.step():
        model.forward(between=timer)
        model.loss()
        model.backward(after_layer=timer)
        model.optimizer()
write(m, "report1.sqlite")
