"""Three training steps with activation checkpointing; segments and blocks fit, and nothing is left over."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "A steady training: nearly all of the reserved memory is allocated at the peak, and each step ends with what it began with.",
    "cause": None,
    "also": ["weights", "optimizer-state", "activations", "logits"],
    "never": ["fragmentation", "cached-memory", "growth", "out-of-memory", "gradient-memory", "score-matrices"],
    "healthy": True,
}

a = Allocator()
training = Training(a, layers=24, d=2048, tokens=16384, vocabulary=8192, checkpointing=True, weight=2)
for _ in range(3):
    training.step(state=1)
a.dump("snapshot.pickle")
