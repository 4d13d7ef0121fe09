"""Rank 0 alone computes metrics after each step; the other waits for it in the next backward."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "truth": "Rank 0 spends 25 ms on metrics after each step, and rank 1 waits for it in the gradients' all-reduce.",
    "cause": "straggler",
    "also": ["host-python", "logging"],
    "never": ["start-up", "data-loading", "small-buckets", "no-sync-missing"],
    "healthy": False,
    "ranks": 2,
}


def metrics(model):
    time.sleep(0.025)
    return sum(p.detach().norm().item() for p in model.parameters())


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)))
optimizer = torch.optim.Adam(model.parameters())
for step in range(36):
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        metrics(model)
dist.destroy_process_group()
