"""Recommendation from a large table of item embeddings, with Adam."""

import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "A batch reads 2,000 of 150,000 rows, yet the gradient is dense and Adam updates all rows: most of each step.",
    "cause": "dense-gradient",
    "also": ["index-backward"],
    "never": [
        "start-up",
        "data-loading",
        "evaluation",
        "growth",
        "periodic-pause",
        "host-python",
        "unfused-optimizer",
        "logging",
    ],
    "healthy": False,
    "place": ["nn.Embedding(items", "torch.optim.Adam(", "optimizer.step()"],
    "share": 91,
    "remedy": "sparse=True with SparseAdam for the tables",
    "without": [
        ["s, d)", "s, d, sparse=True)"],
        ["torch.optim.Adam(model.parameters(), lr=1e-3)", "torch.optim.SparseAdam(model.parameters(), lr=1e-3)"],
    ],
}


class Factorisation(nn.Module):
    def __init__(self, users, items, d):
        super().__init__()
        self.user, self.item = nn.Embedding(users, d), nn.Embedding(items, d)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, user, liked, other):
        u = self.user(user)
        return (u * self.item(liked)).sum(-1), (u * self.item(other)).sum(-1)


def bayesian_ranking(liked, other):
    return -nn.functional.logsigmoid(liked - other).mean()


def triples(users, items, batch):
    while True:
        user = torch.randint(0, users, (batch,))
        yield user, (user * 7 + torch.randint(0, 50, (batch,))) % items, torch.randint(0, items, (batch,))


def main(users=20_000, items=150_000, d=32, batch=1000, steps=60):
    torch.manual_seed(0)
    model = Factorisation(users, items, d)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (user, liked, other) in zip(range(steps), triples(users, items, batch)):
        optimizer.zero_grad()
        loss = bayesian_ranking(*model(user, liked, other))
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"[{step:3d}] ranking loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
