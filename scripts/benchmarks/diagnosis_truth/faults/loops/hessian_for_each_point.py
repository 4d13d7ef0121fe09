"""Physics-informed network for the Poisson equation on a square with walls at zero."""

import math

import torch
from torch import nn

CASE = {
    "generation": 15,
    "truth": "The Laplacian is the trace of a full Hessian that is computed for each point alone, so that the network runs on single rows and backward runs three times per point: 94% of the loop's time.",
    "cause": "small-operators",
    "also": ["repeated-backward", "host-python"],
    "never": ["data-loading", "growth", "evaluation", "logging", "start-up", "decompositions"],
    "healthy": False,
    "place": [
        "second = hessian(lambda p: net(p).squeeze(), point, create_graph=True)",
        "return torch.stack([laplacian(net, point) for point in points])",
        "def laplacian(net, point):",
        "residual = laplacians(net, inside) - source(inside)",
    ],
    "share": 94,
    "remedy": "differentiate the sum over all points twice with torch.autograd.grad, or use torch.func.vmap",
    "without": [
        [
            "    return torch.stack([laplacian(net, point) for point in points])\n",
            "    points = points.requires_grad_()\n"
            "    (first,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)\n"
            "    columns = first.sum(0)\n"
            "    seconds = [torch.autograd.grad(c, points, create_graph=True)[0][:, i] for i, c in enumerate(columns)]\n"
            "    return sum(seconds)\n",
        ],
    ],
}

hessian = torch.autograd.functional.hessian


class Solution(nn.Module):
    """Network whose output is forced to zero on the walls."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, points):
        wall = (points * (1 - points)).prod(-1, keepdim=True)
        return 16 * wall * self.net(points)


def exact(points):
    return (torch.sin(math.pi * points[:, 0]) * torch.sin(2 * math.pi * points[:, 1])).unsqueeze(1)


def source(points):
    return -5 * math.pi**2 * exact(points).squeeze(1)


def laplacian(net, point):
    second = hessian(lambda p: net(p).squeeze(), point, create_graph=True)
    return second.diagonal().sum()


def laplacians(net, points):
    return torch.stack([laplacian(net, point) for point in points])


class Sampler:
    """Points inside the square, drawn anew in each step from a Sobol sequence."""

    def __init__(self, seed):
        self.engine = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed)

    def draw(self, count):
        return self.engine.draw(count)


def train(steps=60, count=16):
    net, sampler = Solution(), Sampler(seed=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    for step in range(1, steps + 1):
        inside = sampler.draw(count)
        residual = laplacians(net, inside) - source(inside)
        loss = residual.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 15 == 0:
            with torch.no_grad():
                check = torch.rand(500, 2)
                error = (net(check) - exact(check)).abs().mean().item()
            print(f"step {step}: residual {loss.item():.2f}, error {error:.4f}")
    return net


if __name__ == "__main__":
    torch.manual_seed(2)
    train()
