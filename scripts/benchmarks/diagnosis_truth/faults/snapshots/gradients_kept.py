"""zero_grad() is called after forward: the gradients of the last step are still there when the activations are."""

from _snapshot import Allocator, Training

CASE = {
    "truth": "6 GB of gradients of the step before stay allocated during forward; zero_grad(set_to_none=True) before it frees them.",
    "cause": "gradient-memory",
    "also": ["activations", "optimizer-state", "weights"],
    "never": ["fragmentation", "growth", "out-of-memory"],
    "healthy": False,
}

a = Allocator()
training = Training(a, layers=28, d=2048, tokens=4096, vocabulary=32000)
for _ in range(3):
    training.forward()
    training.backward()
    training.optimizer()
training.forward()
a.dump("snapshot.pickle")
