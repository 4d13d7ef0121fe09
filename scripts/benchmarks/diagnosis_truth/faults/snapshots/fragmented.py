"""Batches of many different lengths leave free pieces of all sizes; a tensor of 1.4 GB still needs a new segment."""

import random

from _snapshot import MB, Allocator

CASE = {
    "truth": "More than a quarter of the reserved memory is free, but in pieces between live blocks, so that new requests need new segments.",
    "cause": "fragmentation",
    "also": ["cached-memory"],
    "never": ["growth", "out-of-memory", "gradient-memory"],
    "healthy": False,
}

generator = random.Random(7)
a = Allocator()
weights = [a.alloc(180 * MB, "train.py:12:main") for _ in range(20)]
kept = []
for step in range(40):
    length = generator.randint(20, 100) * 6 * MB
    first = a.alloc(length, "train.py:40:forward")
    small = a.alloc(generator.randint(12, 40) * MB, "train.py:41:forward")
    second = a.alloc(length * 1.3, "train.py:42:forward")
    kept.append(small)
    a.free(first)
    a.free(second)
    if step % 3 == 2:
        a.free(kept.pop(generator.randrange(len(kept))))
for factor in (9, 11, 13, 14):
    a.alloc(factor * 100 * MB, "train.py:55:attention")
a.dump("snapshot.pickle")
