"""Energies of small molecules from distances between their atoms, with places refined by the network."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "Distances are square roots of sums of squares, and each atom is at distance zero from itself; the places that the network refines get the gradient zero times infinity there, so that a third of the weights' tensors are NaN after the first step, and the loss from the second on.",
    "cause": "nan-loss",
    "also": ["divergence"],
    "never": [
        "data-loading",
        "host-python",
        "growth",
        "start-up",
        "logging",
        "evaluation",
        "skipped-steps",
        "cut-gradients",
    ],
    "healthy": False,
    "place": ["distance = (apart**2).sum(-1).sqrt()", "loss.backward()", "optimizer.step()", "loss = F.mse_loss("],
    "remedy": "add a small number before the root, or leave the pairs of an atom with itself out",
    "without": [["(apart**2).sum(-1).sqrt()", "((apart**2).sum(-1) + 1e-8).sqrt()"]],
}

KINDS, ATOMS = 6, 18


def molecules(count):
    """Return kinds and places of atoms, and an energy of pairs."""
    kinds = torch.randint(KINDS, (count, ATOMS))
    places = torch.randn(count, ATOMS, 3) * 1.5
    charge = torch.linspace(-1, 1, KINDS)[kinds]
    near = torch.exp(-torch.cdist(places, places) / 1.5)
    return kinds, places, torch.einsum("bi,bij,bj->b", charge, near, charge)


class Interaction(nn.Module):
    def __init__(self, width, bells=24):
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, 6, bells))
        self.filter = nn.Sequential(nn.Linear(bells, width), nn.SiLU(), nn.Linear(width, width))
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.pull = nn.Linear(width, 1)
        nn.init.normal_(self.pull.weight, std=1e-3)

    def forward(self, hidden, places):
        apart = places[:, :, None] - places[:, None]
        distance = (apart**2).sum(-1).sqrt()
        weights = self.filter(torch.exp(-4 * (distance[..., None] - self.centres) ** 2))
        heard = (weights * self.inner(hidden)[:, None]).sum(2)
        places = places + (self.pull(weights) * apart).mean(2)
        return hidden + F.silu(self.outer(heard)), places


class EnergyNet(nn.Module):
    def __init__(self, width=48, layers=3):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, width)
        self.layers = nn.ModuleList([Interaction(width) for _ in range(layers)])
        self.out = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, places):
        hidden = self.kinds(kinds)
        for layer in self.layers:
            hidden, places = layer(hidden, places)
        return self.out(hidden).sum((1, 2))


def train(steps=80, size=24):
    torch.manual_seed(74)
    kinds, places, energies = molecules(2000)
    energies = (energies - energies.mean()) / energies.std()
    model = EnergyNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        pick = torch.randint(len(kinds), (size,))
        loss = F.mse_loss(model(kinds[pick], places[pick]), energies[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    train()
