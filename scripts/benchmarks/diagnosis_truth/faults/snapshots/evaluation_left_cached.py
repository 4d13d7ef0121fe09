"""An evaluation with a batch eight times as large ran first; its cached segments stay reserved during training."""

from _snapshot import GB, Allocator, Training

CASE = {
    "truth": "30 GB stay reserved and unused during training: cached blocks of an earlier evaluation; empty_cache() after it frees them.",
    "cause": "cached-memory",
    "also": ["fragmentation"],
    "never": ["growth", "out-of-memory", "activations"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=8, d=1024, tokens=2048, vocabulary=8192)
a.recording = False
evaluated = [a.alloc(3 * GB, "train.py:102:evaluate") for _ in range(10)]
for block in evaluated:
    a.free(block)
a.recording = True
for _ in range(3):
    training.step()
a.dump("snapshot.pickle")
