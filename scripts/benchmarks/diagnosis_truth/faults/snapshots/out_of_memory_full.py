"""A card of 24 GB that is too small for the batch: the forward fails."""

from contextlib import suppress

from _snapshot import GB, Allocator, OutOfMemory, Training

CASE = {
    "truth": "An allocation in the forward failed with the memory full; activations saved for backward are the largest part.",
    "cause": "out-of-memory",
    "also": ["activations"],
    "never": ["fragmentation", "growth", "gradient-memory"],
    "healthy": False,
}

a = Allocator(capacity=24 * GB)
training = Training(a, layers=24, d=2048, tokens=32768, weight=2)
with suppress(OutOfMemory):
    training.forward()
a.dump("oom.pickle")
