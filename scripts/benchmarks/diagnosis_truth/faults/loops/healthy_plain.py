"""A plain loop over a network that spends its time in products."""

import torch
from torch import nn

CASE = {
    "truth": "Products of 256 × 1024 × 1024 take nearly all of the step; there is nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "evaluation", "small-operators"],
    "healthy": True,
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    x, y = torch.randn(256, 1024), torch.randint(0, 10, (256,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
