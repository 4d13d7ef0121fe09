"""A network with noisy linear layers, as used for exploration, trained on regression."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 3,
    "truth": "Each noisy layer draws a full matrix of noise with NumPy until all are within limits: most of each step.",
    "cause": "host-python",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": ["np.random.normal(", "truncated(", "noise[outside]", "outside = "],
    "share": 56,
    "remedy": "draw factorised noise of one vector per side with torch.randn",
    "without": [
        [
            "torch.from_numpy(truncated(self.weight.shape).astype(np.float32))",
            "torch.randn(self.weight.shape[0], 1) * torch.randn(1, self.weight.shape[1])",
        ]
    ],
}


def truncated(shape, limit=1.0):
    noise = np.random.normal(size=shape)
    outside = np.abs(noise) > limit
    while outside.any():
        noise[outside] = np.random.normal(size=outside.sum())
        outside = np.abs(noise) > limit
    return noise


class NoisyLinear(nn.Module):
    def __init__(self, n_in, n_out, sigma=0.05):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)
        self.sigma = nn.Parameter(torch.full((n_out, n_in), sigma / n_in**0.5))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        noise = torch.from_numpy(truncated(self.weight.shape).astype(np.float32))
        return F.linear(x, self.weight + self.sigma * noise, self.bias)


class Head(nn.Module):
    def __init__(self, n_in, n_out, width=256, depth=3):
        super().__init__()
        sizes = [n_in] + [width] * depth
        self.layers = nn.ModuleList(NoisyLinear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True))
        self.last = NoisyLinear(width, n_out)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.last(x)


def main(steps=90):
    torch.manual_seed(0)
    np.random.seed(0)
    net = Head(32, 6)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    inputs = torch.randn(4096, 32)
    goals = torch.stack([inputs[:, k] * inputs[:, k + 1] for k in range(6)], 1)
    for step in range(steps):
        rows = torch.randint(0, len(inputs), (128,))
        loss = F.mse_loss(net(inputs[rows]), goals[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 30 == 0:
            print(step + 1, loss.item())


if __name__ == "__main__":
    main()
