"""Tabular data, drawn by a permutation of all rows per batch."""

import numpy as np
import torch
from torch import nn

CASE = {
    "truth": "get_batch permutes all 1.5 million indices to choose 64 of them, which takes most of each step.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators"],
    "healthy": False,
}

rng = np.random.default_rng(0)
N = 1_500_000
features = rng.standard_normal((N, 8), dtype=np.float32)
target = features.sum(1, keepdims=True)


def get_batch(size=64):
    index = rng.permutation(N)[:size]
    return torch.from_numpy(features[index]), torch.from_numpy(target[index])


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
for step in range(50):
    x, y = get_batch()
    opt.zero_grad()
    loss = (net(x) - y).pow(2).mean()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 4))
