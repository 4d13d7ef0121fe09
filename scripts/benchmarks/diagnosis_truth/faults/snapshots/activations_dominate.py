"""A long sequence without checkpointing: saved activations are four fifths of the peak."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "Activations saved for backward are 80% of the peak; activation checkpointing would remove most of them.",
    "cause": "activations",
    "also": ["logits"],
    "never": ["fragmentation", "growth", "optimizer-state", "score-matrices"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=16, d=2048, tokens=32768, vocabulary=8192)
for _ in range(3):
    training.step()
a.dump("snapshot.pickle")
