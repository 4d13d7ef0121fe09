"""DDP on two ranks, of which the second computes on more data."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "truth": "Rank 1 has a batch four times as large; rank 0 waits for it in the all-reduce of each step.",
    "cause": "straggler",
    "also": ["exposed-communication"],
    "never": ["start-up", "data-loading", "evaluation", "small-buckets"],
    "healthy": False,
    "ranks": 2,
}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    size = 2048 if rank == 1 else 512
    for _ in range(34):
        x, y = torch.randn(size, 256), torch.randint(0, 16, (size,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(loss.item(), os.environ["WORLD_SIZE"])
    dist.destroy_process_group()


main()
