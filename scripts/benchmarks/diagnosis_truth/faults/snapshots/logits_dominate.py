"""A small model with a large vocabulary: logits, their logarithms and their gradient are three quarters of the peak."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "Logits (8192 × 128,256) with log_softmax and gradient are three quarters of the peak; compute the loss in chunks.",
    "cause": "logits",
    "also": ["activations", "optimizer-state"],
    "never": ["fragmentation", "growth", "score-matrices"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=10, d=640, tokens=8192, vocabulary=128_256, script="pretrain.py")
for _ in range(3):
    training.step()
a.dump("snapshot.pickle")
