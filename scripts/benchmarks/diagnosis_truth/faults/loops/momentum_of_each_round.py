"""Film ratings by factorisation with a small network on top; large batches and plain momentum."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "Each round makes its own optimizer, so the momentum starts at zero again every two steps and the training crawls.",
    "cause": "lost-state",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "host-python",
        "start-up",
        "no-update",
        "small-operators",
    ],
    "healthy": False,
    "place": ["optimizer = torch.optim.SGD("],
    "remedy": "make the optimizer once, before the rounds",
    "without": [
        ["    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.95, nesterov=True)\n", ""],
        [
            "def one_round(model, users, films, stars, batch, rate):\n",
            "def one_round(model, users, films, stars, batch, optimizer):\n",
        ],
        [
            "    for number in range(rounds):\n        mean = one_round(model, *ratings, batch=6144, rate=0.1)\n",
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.95, nesterov=True)\n    for number in range(rounds):\n        mean = one_round(model, *ratings, batch=6144, optimizer=optimizer)\n",
        ],
    ],
}


class Recommender(nn.Module):
    def __init__(self, users=600, films=400, dim=24, width=64):
        super().__init__()
        self.user, self.film = nn.Embedding(users, dim), nn.Embedding(films, dim)
        self.user_bias, self.film_bias = nn.Embedding(users, 1), nn.Embedding(films, 1)
        for table in (self.user, self.film):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.film_bias):
            nn.init.zeros_(table.weight)
        self.net = nn.Sequential(nn.Linear(2 * dim, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, users, films):
        u, f = self.user(users), self.film(films)
        bias = self.user_bias(users) + self.film_bias(films)
        return 3.5 + (bias + self.net(torch.cat([u, f], 1))).squeeze(1) + (u * f).sum(1)


def made_up_ratings(count=12288, users=600, films=400):
    user, film = torch.randint(users, (count,)), torch.randint(films, (count,))
    taste, style = torch.randn(users, 4), torch.randn(films, 4)
    quality, mood = 0.5 * torch.randn(films), 0.4 * torch.randn(users)
    stars = 3.5 + quality[film] + mood[user] + 0.25 * (taste[user] * style[film]).sum(1) + 0.3 * torch.randn(count)
    return user, film, stars.clamp(1, 5)


def one_round(model, users, films, stars, batch, rate):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.95, nesterov=True)
    losses = []
    for pick in torch.randperm(len(stars)).split(batch):
        loss = F.mse_loss(model(users[pick], films[pick]), stars[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main(rounds=80):
    torch.manual_seed(31)
    ratings = made_up_ratings()
    model = Recommender()
    for number in range(rounds):
        mean = one_round(model, *ratings, batch=6144, rate=0.1)
        if number % 10 == 9:
            print(f"round {number + 1}: squared error {mean:.3f}")


if __name__ == "__main__":
    main()
