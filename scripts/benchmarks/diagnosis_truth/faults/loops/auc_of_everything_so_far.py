"""Clicks on advertisements from columns of categories and numbers, with the area under the curve in the progress bar."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

CASE = {
    "generation": 15,
    "truth": "Each step joins and sorts the scores of all batches so far for the area under the curve, so that steps take longer and longer: 47% of the loop's time.",
    "cause": "growth",
    "also": ["logging", "host-python", "evaluation"],
    "never": ["data-loading", "checkpoint-writing", "start-up", "dense-gradient", "small-operators", "no-update"],
    "healthy": False,
    "place": [
        "scores, labels = np.concatenate(self.scores), np.concatenate(self.labels)",
        "order = np.argsort(scores)",
        "ranks[order] = np.arange(1, len(scores) + 1)",
        "auc=meter.compute()",
        "def compute(self):",
    ],
    "share": 47,
    "remedy": "compute the area once an epoch, or from a histogram of scores that each batch adds to",
    "without": [
        [
            '            bar.set_postfix(loss=f"{loss.item():.4f}", auc=meter.compute(), refresh=False)\n',
            '            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)\n',
        ]
    ],
}


class RocAuc:
    """Area under the curve of true and false positives, from ranks."""

    def __init__(self):
        self.scores, self.labels = [], []

    def update(self, scores, labels):
        self.scores.append(scores.detach().numpy())
        self.labels.append(labels.numpy())

    def compute(self):
        scores, labels = np.concatenate(self.scores), np.concatenate(self.labels)
        order = np.argsort(scores)
        ranks = np.empty(len(scores))
        ranks[order] = np.arange(1, len(scores) + 1)
        hits = labels.sum()
        return (ranks[labels > 0].sum() - hits * (hits + 1) / 2) / max(hits * (len(labels) - hits), 1)


class Clicks:
    """Impressions with five columns of categories and six of numbers."""

    sizes = (50, 200, 24, 7, 120)

    def __init__(self, count):
        self.categories = torch.stack([torch.randint(size, (count,)) for size in self.sizes], 1)
        self.numbers = torch.randn(count, 6)
        logit = self.numbers[:, 0] - 0.5 * self.numbers[:, 1] * self.numbers[:, 2] - 1
        logit = logit + (self.categories[:, 1] % 7 == 3).float() + 0.5 * (self.categories[:, 2] > 17).float()
        self.clicked = (torch.rand(count) < logit.sigmoid()).float()

    def batches(self, size):
        for rows in torch.randperm(len(self.clicked)).split(size):
            yield self.categories[rows], self.numbers[rows], self.clicked[rows]


class Ranker(nn.Module):
    def __init__(self, sizes, dim=12, width=160):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, dim) for size in sizes])
        self.layers = nn.Sequential(
            nn.Linear(dim * len(sizes) + 6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, categories, numbers):
        columns = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat([*columns, numbers], 1)).squeeze(1)


def main(epochs=2, size=1024):
    torch.manual_seed(9)
    clicks = Clicks(size * 110)
    model, meter = Ranker(clicks.sizes), RocAuc()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        bar = tqdm(clicks.batches(size), total=110, desc=f"epoch {epoch}", mininterval=2)
        for categories, numbers, clicked in bar:
            logits = model(categories, numbers)
            loss = F.binary_cross_entropy_with_logits(logits, clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(logits, clicked)
            bar.set_postfix(loss=f"{loss.item():.4f}", auc=meter.compute(), refresh=False)
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    print(f"area under the curve: {meter.compute():.4f}")


if __name__ == "__main__":
    main()
