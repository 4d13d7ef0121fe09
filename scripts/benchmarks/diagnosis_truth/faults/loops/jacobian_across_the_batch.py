"""Density of molecular torsions by exact score matching: E[ tr(ds/dx) + |s|^2 / 2 ]."""

import torch
from torch import nn
from torch.autograd.functional import jacobian

CASE = {
    "generation": 8,
    "truth": "The Jacobian is computed of all samples with respect to all samples, with a backward pass for each output of each sample, though only each sample's own block is used: summed over the batch, one pass per dimension would do.",
    "cause": "repeated-backward",
    "also": ["small-operators"],
    "never": ["data-loading", "logging", "evaluation", "growth", "start-up", "no-update", "duplicate-forward"],
    "healthy": False,
    "place": ["jacobian(self.net, x, create_graph=True)", "self.trace("],
    "share": 85,
    "remedy": "take the Jacobian of net(x).sum(0): one backward pass per dimension",
    "without": [
        [
            "        full = jacobian(self.net, x, create_graph=True)\n",
            "        full = jacobian(lambda x: self.net(x).sum(0), x, create_graph=True)\n",
        ],
        ['        return torch.einsum("bibi->b", full)\n', '        return torch.einsum("ibi->b", full)\n'],
    ],
}


class Periodic(nn.Module):
    def forward(self, x):
        return torch.cat([torch.sin(x), torch.cos(x), torch.sin(2 * x), torch.cos(2 * x)], -1)


class ScoreModel(nn.Module):
    def __init__(self, angles=3, width=384):
        super().__init__()
        self.net = nn.Sequential(
            Periodic(),
            nn.Linear(4 * angles, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, angles),
        )

    def trace(self, x):
        """Divergence of the score at each sample."""
        full = jacobian(self.net, x, create_graph=True)
        return torch.einsum("bibi->b", full)

    def loss(self, x):
        score = self.net(x)
        return (self.trace(x) + 0.5 * score.square().sum(1)).mean()


def torsions(count, angles=3):
    """Angles around a few rotamers, correlated along the chain."""
    rotamer = torch.tensor([-1.05, 1.05, 3.14])[torch.randint(3, (count, 1))]
    chain = torch.cumsum(0.3 * torch.randn(count, angles), 1)
    return torch.remainder(rotamer + chain + 3.1416, 6.2832) - 3.1416


def fit(model, data, steps, batch):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4)
    smooth = None
    for step in range(1, steps + 1):
        x = data[torch.randint(len(data), (batch,))]
        loss = model.loss(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        smooth = loss.detach() if smooth is None else 0.95 * smooth + 0.05 * loss.detach()
        if step % 25 == 0:
            print(f"step {step:4d}: objective {smooth.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(31)
    fit(ScoreModel(), torsions(4000), steps=150, batch=10)
