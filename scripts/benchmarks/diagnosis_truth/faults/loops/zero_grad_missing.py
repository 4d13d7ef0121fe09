"""zero_grad() was forgotten: the gradients of all steps add up."""

import torch
from torch import nn

CASE = {
    "truth": "zero_grad() is never called, so each update uses the sum of all gradients so far.",
    "cause": "gradients-not-cleared",
    "also": ["divergence", "growth"],
    "never": ["start-up", "data-loading", "evaluation", "skipped-steps"],
    "healthy": False,
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(60):
    x, y = torch.randn(64, 300), torch.randint(0, 10, (64,))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
