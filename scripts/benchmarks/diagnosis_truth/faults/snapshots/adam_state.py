"""A large model and a small batch: Adam's two moments in fp32 are half of the peak."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "Adam's fp32 moments are half of the peak (weights a quarter); an 8-bit or sharded optimizer would save most of them.",
    "cause": "optimizer-state",
    "also": ["weights", "gradient-memory"],
    "never": ["fragmentation", "growth", "activations", "logits"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=32, d=2560, tokens=512, vocabulary=16000)
for _ in range(3):
    training.step()
a.dump("snapshot.pickle")
