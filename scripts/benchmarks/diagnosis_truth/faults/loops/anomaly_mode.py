"""Anomaly detection was switched on to find a NaN, and left on."""

import torch
from torch import nn

CASE = {
    "truth": "autograd's anomaly detection is on; it stores a stack for each operator and takes most of each step.",
    "cause": "anomaly-detection",
    "also": ["small-operators", "host-python"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}

torch.autograd.set_detect_anomaly(True)
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.SiLU()) for _ in range(60)])
opt = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=True)
for _ in range(40):
    loss = net(torch.randn(16, 32)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
