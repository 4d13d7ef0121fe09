"""A plain loop that augments each sample in Python and computes a metric after each step."""

import time

import torch
from torch import nn

CASE = {
    "truth": "95% of the loop is the script's own Python between the phases: 20 ms in augment, 10 ms in metric.",
    "cause": "host-python",
    "also": ["data-loading", "logging"],
    "never": ["start-up", "evaluation", "small-operators"],
    "healthy": False,
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def augment(x):
    t = time.perf_counter()
    while time.perf_counter() - t < 0.02:
        pass
    return x


def metric():
    time.sleep(0.01)


for _ in range(40):
    x = augment(torch.randn(8, 64))
    y = torch.randint(10, (8,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    metric()
    print(f"{loss.item():.9f}")
