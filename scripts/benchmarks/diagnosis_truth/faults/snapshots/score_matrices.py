"""Attention written by hand: scores, masked scores and softmax of each layer are saved for backward."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "The scores of attention, three tensors of 1 GB per layer, are nearly 90% of the peak; fused attention does not store them.",
    "cause": "score-matrices",
    "also": ["activations", "unfused-attention"],
    "never": ["fragmentation", "growth", "optimizer-state", "logits"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=12, d=1024, tokens=8192, vocabulary=8192, scores=(16, 4096))
for _ in range(2):
    training.step()
a.dump("snapshot.pickle")
