"""Film recommender: what a user watched is pooled, and the next film is a softmax over the catalogue."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 9,
    "truth": "For recall at 10 and 50, each training step sorts the scores of the whole catalogue for every user, though only the first 50 are looked at.",
    "cause": "evaluation",
    "also": ["logging"],
    "never": [
        "data-loading",
        "growth",
        "start-up",
        "padding",
        "no-update",
        "small-operators",
        "host-python",
        "checkpoint-writing",
    ],
    "healthy": False,
    "place": ["ranking = scores.argsort(", "self.recall.add(scores", "def add(self, scores, truth):"],
    "share": 60,
    "remedy": "take scores.topk(50), or count recall only now and then",
    "without": [
        [
            "        ranking = scores.argsort(dim=1, descending=True)\n",
            "        ranking = scores.topk(max(self.cutoffs), dim=1).indices\n",
        ]
    ],
}


class Recall:
    def __init__(self, cutoffs=(10, 50)):
        self.cutoffs = cutoffs
        self.reset()

    def reset(self):
        self.hits = dict.fromkeys(self.cutoffs, 0.0)
        self.seen = 0

    @torch.no_grad()
    def add(self, scores, truth):
        ranking = scores.argsort(dim=1, descending=True)
        for k in self.cutoffs:
            self.hits[k] += (ranking[:, :k] == truth[:, None]).any(1).sum().item()
        self.seen += len(truth)

    def __str__(self):
        return ", ".join(f"recall@{k} {hits / self.seen:.4f}" for k, hits in self.hits.items())


class NextFilm(nn.Module):
    def __init__(self, films, dim=96):
        super().__init__()
        self.films = nn.Embedding(films, dim)
        nn.init.normal_(self.films.weight, std=0.05)
        self.user = nn.Sequential(nn.Linear(dim, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, dim))
        self.popularity = nn.Parameter(torch.zeros(films))

    def forward(self, watched):
        profile = self.films(watched).mean(1)
        return self.user(profile) @ self.films.weight.t() + self.popularity


def histories(users, length, films, genres=40):
    taste = torch.randint(genres, (users, 1))
    popular = (torch.rand(users, length + 1) ** 2 * (films // genres)).long()
    liked = taste * (films // genres) + popular
    anything = torch.randint(films, (users, length + 1))
    seen = torch.where(torch.rand(users, length + 1) < 0.8, liked, anything)
    return seen[:, :-1], seen[:, -1]


class Recommender:
    def __init__(self, films=3000, batch=64):
        self.batch = batch
        self.model = NextFilm(films)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.recall = Recall()
        self.watched, self.following = histories(3200, 20, films)

    def epoch(self):
        self.recall.reset()
        total = 0.0
        for users in torch.randperm(len(self.following)).split(self.batch):
            truth = self.following[users]
            scores = self.model(self.watched[users])
            loss = F.cross_entropy(scores, truth)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
            self.recall.add(scores, truth)
        return total * self.batch / len(self.following)


if __name__ == "__main__":
    torch.manual_seed(8)
    recommender = Recommender()
    for number in range(4):
        mean = recommender.epoch()
        print(f"epoch {number}: loss {mean:.3f}, {recommender.recall}")
