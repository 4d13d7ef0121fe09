"""All batches so far are concatenated in each step, and a statistic of them is computed."""

import torch
from torch import nn

CASE = {
    "truth": "The script concatenates all past batches in each step: step 60 takes many times as long as step 5.",
    "cause": "growth",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation", "periodic-pause"],
    "healthy": False,
}

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 16))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
history = torch.empty(0, 256)


def whiten(x, history):
    mean, std = history.mean(0), history.std(0)
    return (x - mean) / (std + 1e-5)


for step in range(70):
    x = torch.randn(256, 256)
    history = torch.cat([history, x])
    z = encoder(whiten(x, history))
    loss = (z @ z.T / 16 - torch.eye(256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
