"""The loop asks the system for its load by starting a program in each step."""

import subprocess
import time

import torch
from torch import nn

CASE = {
    "truth": "A subprocess per step, which reads the machine's load for the log, takes most of the time.",
    "cause": "logging",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}


def system_stats():
    out = subprocess.run(["cat", "/proc/loadavg", "/proc/meminfo"], capture_output=True, text=True, check=True).stdout
    out += subprocess.run(["uname", "-a"], capture_output=True, text=True, check=True).stdout
    return {"load": out.split()[0], "lines": out.count("\n"), "time": time.time()}


torch.manual_seed(0)
net = nn.Linear(50, 50)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
log = []
for step in range(60):
    opt.zero_grad()
    loss = net(torch.randn(4, 50)).square().mean()
    loss.backward()
    opt.step()
    log.append({"step": step, "loss": loss.item(), **system_stats()})
print(log[-1]["step"])
