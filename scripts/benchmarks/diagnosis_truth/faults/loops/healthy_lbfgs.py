"""L-BFGS with a closure that is called up to ten times per step."""

import torch
from torch import nn

CASE = {
    "truth": "Each step of L-BFGS calls its closure ten times; forward and backward of the closure are its time.",
    "cause": None,
    "also": ["unfused-optimizer"],
    "never": ["data-loading", "host-python", "evaluation", "duplicate-forward"],
    "healthy": True,
}

torch.manual_seed(0)
x = torch.rand(3000, 2)
y = torch.sin(6 * x[:, :1]) * x[:, 1:]
net = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=10, history_size=3, tolerance_grad=0, tolerance_change=0)


def closure():
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss


for _ in range(24):
    loss = opt.step(closure)
print(loss.item())
