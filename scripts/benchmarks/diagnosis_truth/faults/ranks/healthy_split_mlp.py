"""Classifies point clouds with layers that are split over the ranks: each rank has half of every wide layer."""

import torch
import torch.distributed as dist
from torch import nn

CASE = {
    "generation": 11,
    "truth": "Tensor parallelism: both ranks must read the same batch from the same seed and hold different weights, and no gradients are averaged; one all-reduce of 32 KB per split layer and pass is small beside the products.",
    "cause": None,
    "also": ["straggler"],
    "never": [
        "exposed-communication",
        "small-buckets",
        "same-randomness",
        "data-loading",
        "pipeline-bubble",
        "expert-imbalance",
        "duplicate-forward",
        "growth",
    ],
    "healthy": True,
    "ranks": 2,
}

WIDTH, HIDDEN, POINTS, SHAPES = 128, 4096, 48, 6


class Enter(torch.autograd.Function):
    """Hands its input on; the gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Sums the ranks' parts; the gradient goes to each part as it is."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SplitMLP(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        part = slice(rank * HIDDEN // world, (rank + 1) * HIDDEN // world)
        self.up_weight = nn.Parameter(up.weight[part].detach().clone())
        self.up_bias = nn.Parameter(up.bias[part].detach().clone())
        self.down_weight = nn.Parameter(down.weight[:, part].detach().clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        h = nn.functional.linear(Enter.apply(self.norm(x)), self.up_weight, self.up_bias)
        h = nn.functional.linear(nn.functional.relu(h), self.down_weight)
        return x + Leave.apply(h) + self.bias


class CloudNet(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.enter = nn.Linear(3 * POINTS, WIDTH)
        self.layers = nn.Sequential(*(SplitMLP(rank, world) for _ in range(3)))
        self.leave = nn.Linear(WIDTH, SHAPES)

    def forward(self, points):
        return self.leave(self.layers(self.enter(points.flatten(1))))


def make_clouds(count, generator):
    shape = torch.randint(0, SHAPES, (count,), generator=generator)
    points = torch.randn(count, POINTS, 3, generator=generator)
    power = 1 + shape[:, None, None].float()
    points = points / points.abs().pow(power).sum(2, keepdim=True).pow(1 / power)
    return points, shape


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = CloudNet(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(17)
    for step in range(80):
        points, shape = make_clouds(64, generator)
        loss = nn.functional.cross_entropy(model(points), shape)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
