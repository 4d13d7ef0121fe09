"""The loss of each step is appended to a list with its graph: every step leaves its activations behind."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "Every step leaves 1.1 GB of saved activations allocated, as a list of losses keeps their graphs: a leak.",
    "cause": "growth",
    "also": ["activations"],
    "never": ["fragmentation", "out-of-memory", "optimizer-state"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=8, d=1024, tokens=4096, vocabulary=8192)
for _ in range(12):
    training.forward()
    leaked = training.saved
    training.saved = [[] for _ in leaked]
    training.backward()
    training.optimizer()
    training.zero_grad()
a.dump("snapshot.pickle")
