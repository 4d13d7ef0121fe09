"""Weights in bf16, moments in fp32, recording begun after the first step, so the state has no stack."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "The optimizer's state, allocated before the recording began, is two thirds of the peak.",
    "cause": "optimizer-state",
    "also": ["weights", "gradient-memory"],
    "never": ["fragmentation", "growth", "activations", "logits"],
    "healthy": False,
}

a = Allocator()
a.recording = False
training = Training(a, layers=40, d=2048, tokens=1024, vocabulary=16000, weight=2)
training.step()
a.recording = True
for _ in range(2):
    training.step()
a.dump("snapshot.pickle")
