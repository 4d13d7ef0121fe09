"""Poisson's equation on a square with a physics-informed network, on points that are drawn once."""

import math

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "All steps use the same collocation points on purpose: the residual is minimised over a fixed set, as full-batch training does. Second derivatives need one backward pass for each coordinate.",
    "cause": None,
    "also": [],
    "never": ["same-randomness", "repeated-backward", "data-loading", "unused-gradients", "growth", "host-python"],
    "healthy": True,
}


class Solution(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        sizes = [2, *[width] * depth]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.out = nn.Linear(width, 1)

    def forward(self, p):
        h = p
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        # zero on the border by construction
        return self.out(h) * (p * (1 - p)).prod(1, keepdim=True)


def laplacian(u, p):
    (slope,) = torch.autograd.grad(u.sum(), p, create_graph=True)
    total = 0
    for k in range(p.shape[1]):
        (bend,) = torch.autograd.grad(slope[:, k].sum(), p, create_graph=True)
        total = total + bend[:, k]
    return total


def main():
    torch.manual_seed(3)
    points = torch.rand(1024, 2, requires_grad=True)
    source = -2 * math.pi**2 * torch.sin(math.pi * points.detach()).prod(1)
    model = Solution(96, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for step in range(1, 81):
        optimizer.zero_grad()
        loss = (laplacian(model(points), points) - source).square().mean()
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"{step} residual {loss.item():.3e}")


if __name__ == "__main__":
    main()
