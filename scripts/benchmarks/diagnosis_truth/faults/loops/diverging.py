"""Gradient descent with a learning rate just above the stable one."""

import torch
from torch import nn

CASE = {
    "truth": "The loss grows by a constant factor per step, from 1 to over a million: the learning rate is too high.",
    "cause": "divergence",
    "also": ["nan-loss"],
    "never": ["start-up", "data-loading", "evaluation", "skipped-steps"],
    "healthy": False,
}

torch.manual_seed(0)
x = torch.randn(256, 400)
y = x @ torch.randn(400, 1) / 20
model = nn.Linear(400, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.23)
for _ in range(80):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.3g}")
