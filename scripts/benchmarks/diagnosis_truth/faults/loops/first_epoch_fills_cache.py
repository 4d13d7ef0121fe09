"""Samples are prepared when they are first used and kept: the first epoch is slow, all others are fast."""

import torch
from torch import nn

CASE = {
    "truth": "The first epoch, 15 steps, prepares each sample once; afterwards the steps are fast and have no fault.",
    "cause": "start-up",
    "also": ["data-loading", "host-python"],
    "never": ["evaluation", "growth", "periodic-pause"],
    "healthy": False,
}


class Cached:
    def __init__(self):
        self.ready = {}

    def prepare(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(64, 64, generator=g)
        return torch.linalg.eigh(x @ x.T)[0]

    def __getitem__(self, i):
        if i not in self.ready:
            self.ready[i] = self.prepare(i)
        return self.ready[i]


torch.manual_seed(0)
data = Cached()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
opt = torch.optim.Adam(model.parameters())
for epoch in range(6):
    for step in range(15):
        x = torch.stack([data[step * 32 + k] for k in range(32)])
        loss = (model(x) - x.log1p().mean(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
