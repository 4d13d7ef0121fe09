"""Data from NumPy is float64, and the model was made double to fit it."""

import numpy as np
import torch
from torch import nn

CASE = {
    "truth": "Model and data are float64 by accident: every product runs in double precision at half the rate.",
    "cause": "fp64-products",
    "also": ["fp32-products"],
    "never": ["start-up", "data-loading", "evaluation", "small-operators"],
    "healthy": False,
}

rng = np.random.default_rng(0)
X = torch.from_numpy(rng.normal(size=(4096, 784)))
Y = torch.from_numpy(rng.integers(0, 10, 4096))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for i in range(32):
    at = (i * 256) % 4096
    loss = nn.functional.cross_entropy(model(X[at : at + 256]), Y[at : at + 256])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
