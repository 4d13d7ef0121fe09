"""Every ten steps an evaluation that takes longer than the ten steps."""

import sys
import time

import torch
from torch import nn

CASE = {
    "truth": "Most of the time is in every tenth step: an evaluation of 200 batches under no_grad.",
    "cause": "evaluation",
    "also": ["periodic-pause"],
    "never": ["start-up", "data-loading", "small-operators"],
    "healthy": False,
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters())
training = evaluation = 0.0
for i in range(101):
    t = time.perf_counter()
    loss = model(torch.randn(64, 256)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    training += time.perf_counter() - t
    if i % 10 == 9:
        t = time.perf_counter()
        with torch.no_grad():
            for _ in range(200):
                model(torch.randn(64, 256))
        evaluation += time.perf_counter() - t
print(f"training {training:.3f} s, evaluation {evaluation:.3f} s", file=sys.stderr)
