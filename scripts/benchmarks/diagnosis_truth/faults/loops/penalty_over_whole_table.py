"""Bayesian personalised ranking of songs by matrix factorisation with a small tower on top."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 6,
    "truth": "The L2 penalty sums the squares of all rows of both tables, so that gradient and update are dense, for 512 rows of a batch.",
    "cause": "dense-gradient",
    "also": ["elementwise-chain", "unfused-optimizer"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "for parameter in model.parameters()",
        "parameter.pow(2).sum()",
        "loss.backward()",
        "optimizer.step()",
        "+ args.l2 * penalty(model)",
        "optimizer = torch.optim.Adagrad(",
        "self.users = nn.Embedding(",
        "self.songs = nn.Embedding(",
    ],
    "share": 36,
    "remedy": "penalise the rows of the batch alone, with sparse gradients and an optimizer for these",
    "without": [
        [
            "    return sum(parameter.pow(2).sum() for parameter in model.parameters())\n",
            "    return sum(parameter.pow(2).sum() for parameter in model.tower.parameters())\n",
        ],
        ["        self.users = nn.Embedding(users, d)\n", "        self.users = nn.Embedding(users, d, sparse=True)\n"],
        ["        self.songs = nn.Embedding(songs, d)\n", "        self.songs = nn.Embedding(songs, d, sparse=True)\n"],
    ],
}


class Ranker(nn.Module):
    def __init__(self, users, songs, d):
        super().__init__()
        self.users = nn.Embedding(users, d)
        self.songs = nn.Embedding(songs, d)
        for table in (self.users, self.songs):
            nn.init.normal_(table.weight, std=0.05)
        self.tower = nn.Sequential(nn.Linear(3 * d, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 1))

    def forward(self, user, song):
        u, s = self.users(user), self.songs(song)
        return self.tower(torch.cat([u, s, u * s], -1)).squeeze(-1)


def penalty(model):
    return sum(parameter.pow(2).sum() for parameter in model.parameters())


def listened(users, songs, count):
    """Pairs of a user and a song; taste is a circle on which both have a place."""
    user = torch.randint(users, (count,))
    offset = (0.03 * songs * torch.randn(count)).long()
    return user, (user * songs // users + offset) % songs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=24_000)
    parser.add_argument("--songs", type=int, default=16_000)
    parser.add_argument("--d", type=int, default=32)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--l2", type=float, default=1e-6)
    args = parser.parse_args()

    torch.manual_seed(3)
    user, song = listened(args.users, args.songs, 200_000)
    model = Ranker(args.users, args.songs, args.d)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    running = 0.0
    for step in range(args.steps):
        rows = torch.randint(len(user), (args.batch,))
        other = torch.randint(args.songs, (args.batch,))
        better, worse = model(user[rows], song[rows]), model(user[rows], other)
        loss = -F.logsigmoid(better - worse).mean() + args.l2 * penalty(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += 0.05 * (loss.item() - running)
        if step % 40 == 39:
            print(f"step {step + 1}: loss {running:.4f}, AUC {(better > worse).float().mean():.3f}")


if __name__ == "__main__":
    main()
