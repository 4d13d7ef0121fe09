"""Data parallelism by hand: one all_reduce per parameter, after backward."""

import torch
import torch.distributed as dist
from torch import nn

CASE = {
    "truth": "After backward each of 200 small gradients is reduced by a call of its own; these calls take most of the step.",
    "cause": "small-buckets",
    "also": ["exposed-communication"],
    "never": ["start-up", "data-loading", "straggler", "evaluation"],
    "healthy": False,
    "ranks": 2,
}


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(100)])
for p in model.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
for _ in range(32):
    loss = model(torch.randn(16, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    average_gradients(model)
    optimizer.step()
dist.destroy_process_group()
