"""The model is copied after the optimizer was made, and the copy is trained."""

import copy

import torch
from torch import nn

CASE = {
    "truth": "The optimizer holds the parameters of the original, while the copy is trained: no weight of it ever changes.",
    "cause": "no-update",
    "also": ["skipped-steps", "gradients-not-cleared", "divergence"],
    "never": ["start-up", "data-loading", "evaluation", "nan-loss"],
    "healthy": False,
}

torch.manual_seed(0)
original = nn.Sequential(nn.Conv1d(4, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 4, 5, padding=2))
optimizer = torch.optim.Adam(original.parameters(), lr=1e-3)
model = copy.deepcopy(original)
for i in range(50):
    x = torch.randn(32, 4, 200)
    loss = (model(x) - x.cumsum(-1).tanh()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 10 == 0:
        print(i, loss.item())
