"""Eight micro-batches per step under DDP, without no_sync()."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "truth": "All gradients are reduced in each of eight micro-batches, though the optimizer steps once: no_sync() is missing.",
    "cause": "no-sync-missing",
    "also": ["exposed-communication"],
    "never": ["start-up", "data-loading", "straggler", "evaluation"],
    "healthy": False,
    "ranks": 2,
}


class Trainer:
    def __init__(self, accumulate=8):
        self.accumulate = accumulate
        net = nn.Sequential(nn.Linear(500, 1000), nn.ReLU(), nn.Linear(1000, 500))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self):
        self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            x = torch.randn(4, 500)
            loss = nn.functional.mse_loss(self.model(x), x) / self.accumulate
            loss.backward()
        self.optimizer.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
trainer = Trainer()
for _ in range(28):
    trainer.step()
dist.destroy_process_group()
