"""A wide embedding, trained with dense gradients: the all-reduce is far longer than the computation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "truth": "The all-reduce of 48 MB of gradients takes more than half of each step; forward and backward take a few milliseconds.",
    "cause": "exposed-communication",
    "also": [],
    "never": ["start-up", "data-loading", "straggler", "small-buckets", "find-unused-parameters"],
    "healthy": False,
    "ranks": 2,
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3000, 2000), nn.ReLU(), nn.Linear(2000, 3000))

    def forward(self, x):
        return self.layers(x)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(30):
        loss = model(torch.randn(2, 3000)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
