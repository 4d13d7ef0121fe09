"""Gaussian process of sea temperature: length scales and noise follow from the marginal likelihood."""

import math

import torch
from torch import nn

CASE = {
    "generation": 10,
    "truth": "A Cholesky decomposition in double precision in each step is the method itself: the kernel's matrix changes with the parameters, and in single precision it would not stay positive definite.",
    "cause": None,
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "growth",
        "no-update",
        "host-python",
        "casts",
        "start-up",
        "duplicate-forward",
    ],
    "healthy": True,
}


class Kernel(nn.Module):
    """Matern 5/2 in space, with one length per axis, plus a yearly period."""

    def __init__(self, axes=2):
        super().__init__()
        self.log_length = nn.Parameter(torch.zeros(axes))
        self.log_size = nn.Parameter(torch.zeros(2))
        self.log_period_length = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        scale = self.log_length.exp()
        distance = torch.cdist(a[:, :2] / scale, b[:, :2] / scale, compute_mode="donot_use_mm_for_euclid_dist")
        r = math.sqrt(5) * distance
        space = (1 + r + r**2 / 3) * torch.exp(-r)
        phase = math.pi * (a[:, 2:] - b[:, 2:].t())
        season = torch.exp(-2 * (torch.sin(phase) / self.log_period_length.exp()) ** 2)
        size = self.log_size.exp()
        return size[0] * space + size[1] * season


class Process(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = Kernel()
        self.log_noise = nn.Parameter(torch.tensor(-1.0))
        self.mean = nn.Parameter(torch.zeros(()))

    def factor(self, x):
        k = self.kernel(x, x)
        return torch.linalg.cholesky(k + self.log_noise.exp() * torch.eye(len(x)))

    def forward(self, x, y):
        lower = self.factor(x)
        rest = (y - self.mean)[:, None]
        white = torch.linalg.solve_triangular(lower, rest, upper=False)
        likelihood = -0.5 * white.square().sum() - lower.diagonal().log().sum() - 0.5 * len(x) * math.log(2 * math.pi)
        return -likelihood / len(x)

    @torch.no_grad()
    def predict(self, x, y, new):
        weights = torch.cholesky_solve((y - self.mean)[:, None], self.factor(x))
        return self.mean + (self.kernel(new, x) @ weights).squeeze(1)


def buoys(count):
    x = torch.rand(count, 3) * torch.tensor([4.0, 4.0, 3.0])
    temperature = 10 + 2 * torch.sin(x[:, 0]) * torch.cos(1.5 * x[:, 1]) + 3 * torch.sin(2 * math.pi * x[:, 2])
    return x, temperature + 0.3 * torch.randn(count)


def main(steps=120):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(18)
    x, y = buoys(260)
    new, truth = buoys(80)
    centre = y.mean()
    process = Process()
    optimizer = torch.optim.Adam(process.parameters(), lr=0.05)
    for step in range(steps):
        loss = process(x, y - centre)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step:3d}: {loss.item():.4f} nats, noise {process.log_noise.exp().item():.3f}")
    error = (process.predict(x, y - centre, new) + centre - truth).square().mean().sqrt()
    print(f"error on new buoys {error.item():.3f} degrees")


if __name__ == "__main__":
    main()
