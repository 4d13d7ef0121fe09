"""Two stages of a model on two ranks, one batch at a time."""

import torch
import torch.distributed as dist
from torch import nn

CASE = {
    "truth": "The two stages compute in turn, with one batch in flight: each rank waits for the other half of the time.",
    "cause": "pipeline-bubble",
    "also": ["exposed-communication"],
    "never": ["start-up", "data-loading", "straggler", "evaluation"],
    "healthy": False,
    "ranks": 2,
}

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
rank = dist.get_rank()
stage = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)])
optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
for _ in range(32):
    optimizer.zero_grad()
    if rank == 0:
        out = stage(torch.randn(512, 512))
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
    else:
        x = torch.empty(512, 512)
        dist.recv(x, 0)
        x.requires_grad_()
        stage(x).square().mean().backward()
        dist.send(x.grad, 0)
    optimizer.step()
dist.destroy_process_group()
