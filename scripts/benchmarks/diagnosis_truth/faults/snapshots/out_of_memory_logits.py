"""With a vocabulary of 152,000, the gradient of the logits does not fit in memory, after the whole forward did."""

from contextlib import suppress

from _snapshot import GB, Allocator, OutOfMemory, Training

CASE = {
    "truth": "The request that failed is the gradient of the logits; logits and their logarithms hold two thirds of the memory.",
    "cause": "out-of-memory",
    "also": ["logits"],
    "never": ["fragmentation", "growth", "activations", "gradient-memory"],
    "healthy": False,
}

a = Allocator(capacity=32 * GB)
training = Training(a, layers=12, d=1024, tokens=24576, vocabulary=152_000, weight=2)
training.forward()
with suppress(OutOfMemory):
    training.backward()
a.dump("oom_snapshot.pickle")
