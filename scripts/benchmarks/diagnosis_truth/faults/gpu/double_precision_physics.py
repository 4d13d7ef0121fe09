"""A network for a differential equation, in double precision as the solver is."""

import torch
from torch import nn

CASE = {
    "truth": "The network computes in fp64, because of set_default_dtype; its products are most of the step.",
    "cause": "fp64-products",
    "also": ["elementwise-chain"],
    "never": ["host-python", "data-loading", "launch-bound", "host-sync"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(
    nn.Linear(3, 2048),
    nn.Tanh(),
    nn.Linear(2048, 2048),
    nn.Tanh(),
    nn.Linear(2048, 2048),
    nn.Tanh(),
    nn.Linear(2048, 1),
).cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
points = torch.rand(32768, 3, device="cuda")
truth = (points * 6.28).sin().prod(1, keepdim=True)
for _step in range(40):
    loss = (model(points) - truth).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
