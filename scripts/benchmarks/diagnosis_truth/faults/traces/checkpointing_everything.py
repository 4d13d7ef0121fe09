"""Activation checkpointing on every layer although the memory would suffice: backward runs each layer's forward again."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "Each layer's forward runs again inside backward (torch.utils.checkpoint): a quarter of the GPU's time.",
    "cause": "recomputation",
    "also": [],
    "never": ["launch-bound", "data-loading", "host-sync", "evaluation"],
    "healthy": False,
}

m = Machine(51)
model = Transformer(m, layers=6, d=2048, tokens=8192)


def again(layer: int) -> None:
    tape = model.tape
    with m.node("CheckpointFunctionBackward", 50 + layer), m.python("torch/utils/checkpoint.py(271): backward"):
        model.block()
    model.tape = tape


for _ in range(3):
    with m.step():
        model.forward()
        model.loss()
        model.tape = list(model.tape)
        model.backward(before_layer=again)
        model.optimizer()
        m.item()
write(m, "trace.json.gz")
