"""Matrix factorisation with a small tower on top, for ratings of films that lie in memory as three tensors."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 14,
    "truth": "All ratings lie in three tensors, but a DataLoader over a TensorDataset takes each batch of 2048 apart into single numbers and stacks them again: the model needs less time than that.",
    "cause": "data-loading",
    "also": [],
    "never": ["evaluation", "growth", "start-up", "no-update", "logging", "dense-gradient", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "for users, films, stars in self.loader:",
        "return DataLoader(TensorDataset(*columns), batch_size=config.batch, shuffle=True)",
    ],
    "share": 90,
    "remedy": "index the tensors with a batch of a random permutation",
    "without": [
        [
            "    return DataLoader(TensorDataset(*columns), batch_size=config.batch, shuffle=True)\n",
            "    class Rows:\n        def __iter__(self):\n            for rows in torch.randperm(len(columns[0])).split(config.batch):\n                yield [column[rows] for column in columns]\n\n    return Rows()\n",
        ]
    ],
}


@dataclass
class Config:
    users: int = 2000
    films: int = 1500
    width: int = 32
    ratings: int = 2048 * 30
    batch: int = 2048
    epochs: int = 3
    lr: float = 0.01


def make_ratings(config):
    users = torch.randint(config.users, (config.ratings,))
    films = torch.randint(config.films, (config.ratings,))
    taste, kind = torch.randn(config.users, 4), torch.randn(config.films, 4)
    return users, films, (taste[users] * kind[films]).sum(1) + 0.2 * torch.randn(config.ratings)


def loader_of(columns, config):
    return DataLoader(TensorDataset(*columns), batch_size=config.batch, shuffle=True)


class Tower(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.user = nn.Embedding(config.users, config.width)
        self.film = nn.Embedding(config.films, config.width)
        self.mlp = nn.Sequential(nn.Linear(2 * config.width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, users, films):
        a, b = self.user(users), self.film(films)
        return (a * b).sum(1) + self.mlp(torch.cat([a, b], 1)).squeeze(1)


class Experiment:
    def __init__(self, config):
        self.config = config
        self.net = Tower(config)
        self.loader = loader_of(make_ratings(config), config)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.lr, fused=True)

    def epoch(self):
        total, count = torch.zeros(()), 0
        for users, films, stars in self.loader:
            loss = nn.functional.mse_loss(self.net(users, films), stars)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total, count = total + loss.detach(), count + 1
        return total.item() / count

    def run(self):
        for epoch in range(self.config.epochs):
            print(f"epoch {epoch + 1}: mse {self.epoch():.3f}")


if __name__ == "__main__":
    torch.manual_seed(99)
    Experiment(Config()).run()
