"""next(iter(loader)) in every step starts the workers anew each time."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "truth": "next(iter(loader)) in each step starts a worker process and ends it again: 90% of the time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators"],
    "healthy": False,
}

torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 32), torch.randn(512, 1))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())

for i in range(32):
    x, y = next(iter(loader))
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", loss.item())
