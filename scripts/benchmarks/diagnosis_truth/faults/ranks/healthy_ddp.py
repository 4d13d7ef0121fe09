"""DDP with little to reduce and enough to compute."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "truth": "Two equal ranks; the all-reduce of 1 MB is a small share, and the convolutions take the step.",
    "cause": None,
    "also": ["straggler"],
    "never": ["exposed-communication", "small-buckets", "find-unused-parameters", "data-loading"],
    "healthy": True,
    "ranks": 2,
}

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
)
model = DDP(nn.Sequential(net, nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(32):
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(step, loss.item())
dist.destroy_process_group()
