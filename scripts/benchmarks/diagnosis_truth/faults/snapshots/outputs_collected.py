"""Predictions of the evaluation are collected on the GPU, batch after batch."""

from _snapshot import MB, Allocator, Training

CASE = {
    "truth": "evaluate() appends each batch's logits to a list on the GPU: 0.5 GB more per batch, 30 GB at the end.",
    "cause": "growth",
    "also": ["logits", "evaluation"],
    "never": ["fragmentation", "out-of-memory", "optimizer-state", "activations"],
    "healthy": False,
}

a = Allocator()
model = Training(a, layers=12, d=1024, tokens=8192, weight=2)
predictions = []
for _ in range(60):
    hidden = [a.alloc(s * MB, "eval.py:25:forward", "eval.py:44:evaluate") for s in (16, 64, 48)]
    predictions.append(a.alloc(8192 * 32000 * 2, "eval.py:29:forward", "eval.py:45:evaluate"))
    for block in hidden:
        a.free(block)
a.dump("eval.pickle")
