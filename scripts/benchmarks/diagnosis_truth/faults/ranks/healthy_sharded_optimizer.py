"""Denoising diffusion on two ranks, each of which keeps the optimizer's state of half of the weights."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 5,
    "truth": "Each rank updates half of the weights and sends these 0.7 MB to the other, a few percent; equal convolutions take the time.",
    "cause": None,
    "also": [],
    "never": ["exposed-communication", "straggler", "small-buckets", "find-unused-parameters", "host-python"],
    "healthy": True,
    "ranks": 2,
}


class TimeBlock(nn.Module):
    """A residual block of convolutions that is shifted and scaled by the noise level."""

    def __init__(self, channels, d_time):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(d_time, 2 * channels)

    def forward(self, x, t):
        scale, shift = self.time(t)[:, :, None, None].chunk(2, 1)
        y = self.first(F.silu(self.norm(x) * (1 + scale) + shift))
        return x + self.second(F.silu(y))


class Denoiser(nn.Module):
    def __init__(self, channels=48, blocks=4, d_time=32):
        super().__init__()
        self.register_buffer("frequency", torch.exp(torch.linspace(0, math.log(1000), d_time // 2)))
        self.enter, self.leave = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.blocks = nn.ModuleList(TimeBlock(channels, d_time) for _ in range(blocks))

    def forward(self, x, level):
        angle = level[:, None] * self.frequency
        t = torch.cat([angle.sin(), angle.cos()], 1)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, t)
        return self.leave(x)


def diffusion_loss(model, clean):
    level = torch.rand(len(clean))
    keep = torch.cos(level * math.pi / 2)[:, None, None, None]
    noise = torch.randn_like(clean)
    noisy = keep * clean + (1 - keep**2).sqrt() * noise
    return F.mse_loss(model(noisy, level), noise)


def flags(batch, side=24):
    stripes = torch.randint(2, 5, (batch, 1, 1, 1))
    row = torch.arange(side).view(1, 1, side, 1) * stripes // side
    colour = torch.rand(batch, 3, 5, 1) * 2 - 1
    return colour.gather(2, row.expand(batch, 3, side, 1)).expand(batch, 3, side, side)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Denoiser(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=4e-4, weight_decay=0.01)
    torch.manual_seed(1 + rank)
    for step in range(40):
        loss = diffusion_loss(model, flags(12))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
