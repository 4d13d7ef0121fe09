"""Densities of particle jets: a normalizing flow of ten affine couplings."""

import math

import torch
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Ten couplings run one after the other, as each needs the result of the one before; their halves are cut and joined each time, but products of the networks inside take the time.",
    "cause": None,
    "also": [],
    "never": [
        "small-operators",
        "needless-copies",
        "elementwise-chain",
        "decompositions",
        "divergence",
        "layout-conversion",
        "data-loading",
        "growth",
        "cut-gradients",
        "no-update",
    ],
    "healthy": True,
}

SIZE = 12


def jets(count):
    """Return events whose numbers depend on each other in curved ways."""
    free = torch.randn(count, SIZE)
    bent = free.clone()
    for one in range(1, SIZE):
        bent[:, one] = 0.5 * free[:, one] + torch.sin(2 * bent[:, one - 1]) * free[:, 0].abs().sqrt()
    return bent


class Coupling(nn.Module):
    """Invertible layer that scales and shifts one half of the numbers by what the other half suggests."""

    def __init__(self, width):
        super().__init__()
        half = SIZE // 2
        self.net = nn.Sequential(
            nn.Linear(half, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * half)
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        fixed, moved = x.chunk(2, 1)
        scale, shift = self.net(fixed).chunk(2, 1)
        scale = torch.tanh(scale)
        return torch.cat([moved * scale.exp() + shift, fixed], 1), scale.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=10, width=192):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width) for _ in range(depth))

    def log_density(self, x):
        grown = 0.0
        for coupling in self.couplings:
            x, more = coupling(x)
            grown = grown + more
        return grown - 0.5 * x.square().sum(1) - 0.5 * SIZE * math.log(2 * math.pi)


def main(steps=100, batch=512):
    torch.manual_seed(76)
    events = jets(20000)
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3, fused=True)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, 20)
    for step in range(1, steps + 1):
        some = events[torch.randint(len(events), (batch,))]
        loss = -flow.log_density(some).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 25 == 0:
            print(f"step {step}: {loss.item():.3f} nats")


if __name__ == "__main__":
    main()
