"""A deep equilibrium network on pictures: one layer is iterated to its fixed point, then differentiated once."""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 5,
    "truth": "The iterations without gradients are the network's own forward pass, whose convolutions take the time; one more has gradients.",
    "cause": None,
    "also": [],
    "never": ["evaluation", "duplicate-forward", "small-operators", "host-python", "recomputation", "growth"],
    "healthy": True,
}


class Cell(nn.Module):
    """z ↦ f(z, x), a residual block with weights that keep it contracting."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, channels)
        for conv in (self.first, self.second):
            nn.init.normal_(conv.weight, std=0.02)

    def forward(self, z, x):
        return self.norm(F.relu(z + self.second(x + F.relu(self.first(z)))))


class Equilibrium(nn.Module):
    def __init__(self, cell, iterations, tolerance):
        super().__init__()
        self.cell, self.iterations, self.tolerance, self.used = cell, iterations, tolerance, 0

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for self.used in range(1, self.iterations + 1):
                after = self.cell(z, x)
                gap = (after - z).norm() / after.norm()
                z = after
                if gap < self.tolerance:
                    break
        return self.cell(z, x)


class Net(nn.Module):
    def __init__(self, channels, iterations, tolerance, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.core = Equilibrium(Cell(channels), iterations, tolerance)
        self.head = nn.Linear(16 * channels, classes)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.core(self.stem(x)), 4).flatten(1))


def pictures(batch):
    label = torch.randint(10, (batch,))
    angle = label / 10 * 3.14159
    line = torch.linspace(-3, 3, 32)
    wave = torch.sin(
        3 * (line[None, :, None] * angle.cos()[:, None, None] + line[None, None, :] * angle.sin()[:, None, None])
    )
    return wave[:, None] + 0.3 * torch.randn(batch, 3, 32, 32), label


def parse(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch", type=int, default=32)
    parser.add_argument("-c", "--channels", type=int, default=40)
    parser.add_argument("-i", "--iterations", type=int, default=10)
    parser.add_argument("-t", "--tolerance", type=float, default=1e-3)
    parser.add_argument("-n", "--steps", type=int, default=90)
    return parser.parse_args(words)


def main(words):
    args = parse(words)
    torch.manual_seed(6)
    net = Net(args.channels, args.iterations, args.tolerance)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for step in range(args.steps):
        x, label = pictures(args.batch)
        logits = net(x)
        loss = F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        if step % 10 == 0:
            hit = (logits.argmax(1) == label).float().mean()
            print(f"{step:3d} loss {loss.item():.3f} accuracy {hit:.2f} after {net.core.used} iterations")


if __name__ == "__main__":
    main(sys.argv[1:])
