"""A masked autoencoder for tables, with the mean of the losses of all samples in the progress line."""

import sys

import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "The mean over the losses of all samples so far is summed anew in each step, so that steps become ever slower.",
    "cause": "growth",
    "also": ["logging", "host-python"],
    "never": ["start-up", "data-loading", "evaluation", "periodic-pause", "small-operators"],
    "healthy": False,
    "place": ["sum(self.values)", "self.values.extend(", "meter.mean()", "meter.add("],
    "share": 87,
    "remedy": "keep the sum and the count",
    "without": [["meter.mean()", "per_row.mean()"]],
}


class Meter:
    def __init__(self):
        self.values = []

    def add(self, values):
        self.values.extend(values.detach())

    def mean(self):
        return sum(self.values) / len(self.values)


class Autoencoder(nn.Module):
    def __init__(self, columns=40, width=256):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2 * columns, width), nn.ReLU(), nn.Linear(width, 64))
        self.decoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, columns))

    def forward(self, table):
        keep = (torch.rand_like(table) > 0.3).float()
        return self.decoder(self.encoder(torch.cat([table * keep, keep], 1)))


def rows(count):
    hidden = torch.randn(count, 5)
    mix = torch.randn(5, 40, generator=torch.Generator().manual_seed(7))
    return hidden @ mix + 0.1 * torch.randn(count, 40)


def run(steps=120, batch=200):
    torch.manual_seed(0)
    net, meter = Autoencoder(), Meter()
    optimizer = torch.optim.NAdam(net.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        table = rows(batch)
        per_row = (net(table) - table).square().mean(1)
        meter.add(per_row)
        optimizer.zero_grad()
        per_row.mean().backward()
        optimizer.step()
        sys.stdout.write(f"\r{step}/{steps} loss {meter.mean():.4f}")
    sys.stdout.write("\n")


if __name__ == "__main__":
    run()
