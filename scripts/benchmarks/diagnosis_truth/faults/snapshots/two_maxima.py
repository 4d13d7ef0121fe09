"""At the start 20 GB are reserved for a warm-up and freed; later 5 GB are reserved and all of them used."""

from _snapshot import GB, Allocator

CASE = {
    "truth": "At the peak of the allocated memory all of the reserved memory is used; what was reserved earlier was given back.",
    "cause": None,
    "also": ["weights"],
    "never": ["fragmentation", "cached-memory", "out-of-memory", "growth"],
    "healthy": True,
}

a = Allocator()
a.recording = False
for block in [a.alloc(2 * GB, "train.py:8:warm_up") for _ in range(10)]:
    a.free(block)
a.recording = True
a.free_segments()
for _ in range(5):
    a.alloc(GB, "train.py:30:main")
a.dump("snapshot.pickle")
