"""A "memory cleanup" at the end of every step, with a dataset of many Python objects in memory."""

import gc

import torch
from torch import nn

CASE = {
    "truth": "gc.collect() at the end of each step visits all objects of the process and takes most of the time.",
    "cause": "garbage-collection",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}

samples = [{"id": [i], "tokens": [i % 7, [i % 11]], "meta": {"k": [i]}} for i in range(8_000)]


def cleanup():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(12, 32), nn.Flatten(), nn.Linear(64, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(28):
    rows = samples[step * 64 : step * 64 + 64]
    x = torch.tensor([[r["tokens"][0], r["tokens"][1][0]] for r in rows])
    loss = nn.functional.cross_entropy(model(x), x[:, 0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    cleanup()
