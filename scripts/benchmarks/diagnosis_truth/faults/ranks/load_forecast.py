"""Forecast of electricity use from weather tables, with the optimizer's state spread over the ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CASE = {
    "generation": 11,
    "truth": "The schedule counts the samples of all ranks, but its length is the samples of one: with 3 ranks the cosine ends after a third of the steps, and the rest trains with a thousandth of the learning rate.",
    "cause": "learning-rate-too-small",
    "also": ["no-update", "straggler", "exposed-communication"],
    "never": ["data-loading", "growth", "nan-loss", "divergence", "skipped-steps", "checkpoint-writing"],
    "healthy": False,
    "ranks": 3,
    "place": ["total = EPOCHS * len(loader) * BATCH", "seen += len(x) * world", 'group["lr"] = '],
    "remedy": "count both in the same unit: the samples of one rank in seen, or those of all ranks in total",
    "without": [
        ["        total = EPOCHS * len(loader) * BATCH\n", "        total = EPOCHS * len(loader) * BATCH * world\n"]
    ],
}

EPOCHS, BATCH, RATE = 5, 128, 3e-3


def make_table(rows):
    generator = torch.Generator().manual_seed(11)
    hour = torch.rand(rows, generator=generator) * 24
    day = torch.randint(0, 7, (rows,), generator=generator)
    weather = torch.randn(rows, 28, generator=generator)
    use = torch.sin(hour * math.pi / 12) * (1 + 0.3 * (day > 4).float())
    use = use + 0.4 * (weather[:, 0] * weather[:, 1]) + 0.3 * torch.cos(2 * weather[:, 2]) + 0.2 * weather[:, 3].abs()
    features = torch.cat([torch.stack([torch.sin(hour / 3.82), torch.cos(hour / 3.82), hour / 24], 1), weather], 1)
    return TensorDataset(torch.cat([features, nn.functional.one_hot(day, 7).float()], 1), use)


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Forecaster(nn.Module):
    def __init__(self, features=38, width=192, depth=4):
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.leave = nn.Linear(width, 1)

    def forward(self, x):
        return self.leave(self.blocks(self.enter(x))).squeeze(1)


def cosine(progress, low=1e-3):
    progress = min(progress, 1.0)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    table = make_table(7680)
    sampler = DistributedSampler(table, shuffle=True, seed=4)
    loader = DataLoader(table, batch_size=BATCH, sampler=sampler, drop_last=True)
    model = DDP(Forecaster(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE)
    seen = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = EPOCHS * len(loader) * BATCH
        running = 0.0
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = RATE * cosine(seen / total)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(x) * world
            running += loss.item()
        mean = torch.tensor(running / len(loader))
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: mean squared error {mean.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
