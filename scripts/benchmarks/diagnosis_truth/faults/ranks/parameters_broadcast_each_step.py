"""Data parallel training by hand: gradients averaged in one buffer, and the weights broadcast to be sure."""

import os

import torch
import torch.distributed as dist
from torch import nn

CASE = {
    "generation": 3,
    "truth": "Rank 0 broadcasts each of 170 parameters after each step, although all ranks hold the same.",
    "cause": "exposed-communication",
    "also": ["small-buckets"],
    "never": [
        "start-up",
        "data-loading",
        "evaluation",
        "growth",
        "straggler",
        "find-unused-parameters",
        "no-sync-missing",
    ],
    "healthy": False,
    "ranks": 3,
    "place": ["dist.broadcast(p.data", "self.same_weights()", "dist.broadcast("],
    "share": None,
    "remedy": "broadcast the weights once before the loop",
    "without": [["        self.same_weights()\n        return", "        return"]],
}


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Worker:
    def __init__(self, model, lr):
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=0.9)
        self.same_weights()

    def same_weights(self):
        for p in self.parameters:
            dist.broadcast(p.data, src=0)

    def average_gradients(self):
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        at = 0
        for p in self.parameters:
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    def train_step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.average_gradients()
        self.optimizer.step()
        self.same_weights()
        return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(10 + rank)
    model = nn.Sequential(nn.Linear(32, 64), *[Residual(64) for _ in range(28)], nn.Linear(64, 8))
    worker = Worker(model, lr=0.01)
    for step in range(40):
        x = torch.randn(64, 32)
        loss = worker.train_step(x, x[:, :8].cumsum(1))
        if rank == 0 and step % 10 == 0:
            print(step, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
