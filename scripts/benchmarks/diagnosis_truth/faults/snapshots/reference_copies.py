"""Preference training with a frozen reference model and an average of the weights, both in fp32 on the same GPU."""

from _snapshot import LIB, Allocator, Training

CASE = {
    "truth": "Two further fp32 copies of the weights (reference and average) are half of the peak.",
    "cause": "model-copies",
    "also": ["weights", "activations"],
    "never": ["fragmentation", "growth", "out-of-memory", "logits"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=24, d=2048, tokens=1024, vocabulary=16000)
for name in ("reference", "average"):
    place = (LIB + "_tensor.py:136:__deepcopy__", "copy.py:153:deepcopy", f"dpo.py:18:make_{name}")
    copies = [a.alloc(n * 4, *place) for n in training.shapes]
for _ in range(3):
    training.step(state=0)
a.dump("dpo.pickle")
