"""The best state is saved whenever the loss falls, and in this problem it falls in every step."""

import io
import math

import torch
from torch import nn

CASE = {
    "truth": "torch.save of the best state takes most of the time, as the loss improves in every step.",
    "cause": "checkpoint-writing",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1200, 2000), nn.Tanh(), nn.Linear(2000, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-5)
x, y = torch.randn(8, 1200), torch.randn(8, 1)
best, best_state = math.inf, None
for epoch in range(60):
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    if loss.item() < best:
        best = loss.item()
        for kind in ("last", "best"):
            buffer = io.BytesIO()
            torch.save({"state": net.state_dict(), "kind": kind, "loss": best}, buffer)
            best_state = buffer.getvalue()
print(best, len(best_state))
