"""find_unused_parameters=True for a model that always uses all of its many parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "truth": "find_unused_parameters=True searches the graph of 600 parameters in every step and all are used: measured, about 5% of the step; 600 small operators take more.",
    "cause": "find-unused-parameters",
    "also": ["exposed-communication", "small-operators"],
    "never": ["start-up", "data-loading", "straggler", "evaluation"],
    "healthy": False,
    "ranks": 2,
}

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(300)])
model = DDP(net, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
for _ in range(30):
    loss = model(torch.randn(4, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
