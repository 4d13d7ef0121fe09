"""An autoencoder is trained for 12 steps by one optimizer, and then the larger model for 30 by another."""

import torch
from torch import nn

CASE = {
    "truth": "The second loop, of 30 steps, is the training; its time is products. The first was a short pretraining.",
    "cause": None,
    "also": ["unfused-optimizer"],
    "never": ["start-up", "data-loading", "host-python", "small-operators"],
    "healthy": True,
}

torch.manual_seed(0)
small = nn.Linear(8, 8)
first = torch.optim.SGD(small.parameters(), lr=0.1)
for _ in range(12):
    small(torch.randn(4, 8)).pow(2).mean().backward()
    first.step()
    first.zero_grad()
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
second = torch.optim.AdamW(model.parameters())
for _ in range(30):
    model(torch.randn(256, 512)).pow(2).mean().backward()
    second.step()
    second.zero_grad()
