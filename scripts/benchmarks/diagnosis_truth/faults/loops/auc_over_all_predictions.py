"""Click prediction with embeddings, and a running AUC in NumPy shown by tqdm."""

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

CASE = {
    "generation": 2,
    "truth": "Each step concatenates all predictions so far and sorts them for the AUC, so that steps become ever slower.",
    "cause": "growth",
    "also": ["host-python", "logging"],
    "never": ["start-up", "data-loading", "evaluation", "periodic-pause", "small-operators"],
    "healthy": False,
    "place": ["np.concatenate(", "scores.argsort()", "auc.update(", "auc.value()", "order ="],
    "share": 53,
    "remedy": "compute the AUC at the end of the epoch, or from a histogram of fixed size",
    "without": [
        [
            '        bar.set_postfix(loss=f"{loss.item():.4f}", auc=f"{auc.value():.4f}")',
            '        bar.set_postfix(loss=f"{loss.item():.4f}")',
        ],
        ["        auc.update(logits.detach(), label)\n", ""],
    ],
}


class RunningAUC:
    def __init__(self):
        self.scores, self.labels = np.zeros(0, np.float32), np.zeros(0, np.float32)

    def update(self, logits, labels):
        self.scores = np.concatenate([self.scores, torch.sigmoid(logits).numpy()])
        self.labels = np.concatenate([self.labels, labels.numpy()])

    def value(self):
        order = self.scores.argsort()
        ranks = np.empty(len(order))
        ranks[order] = np.arange(1, len(order) + 1)
        positive = self.labels > 0.5
        n = positive.sum()
        return (ranks[positive].sum() - n * (n + 1) / 2) / max(n * (len(order) - n), 1)


class ClickModel(nn.Module):
    def __init__(self, sizes, d=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, d) for n in sizes)
        self.deep = nn.Sequential(nn.Linear(d * len(sizes), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        return self.deep(torch.cat([t(i) for t, i in zip(self.tables, ids.T)], 1)).squeeze(1)


def clicks(batch, sizes, generator):
    ids = torch.stack([torch.randint(0, n, (batch,), generator=generator) for n in sizes], 1)
    return ids, ((ids.sum(1) % 5) == 0).float()


def main(steps=60, batch=4096):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    sizes = [500, 200, 50, 30]
    model, auc = ClickModel(sizes), RunningAUC()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    bar = tqdm(range(steps), mininterval=5)
    for _ in bar:
        ids, label = clicks(batch, sizes, generator)
        logits = model(ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auc.update(logits.detach(), label)
        bar.set_postfix(loss=f"{loss.item():.4f}", auc=f"{auc.value():.4f}")


if __name__ == "__main__":
    main()
