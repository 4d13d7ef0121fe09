"""Metric learning: embeddings, and the hardest triplets of each batch."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 3,
    "truth": "The hardest positive and negative of each anchor are searched by two Python loops over the lists of distances.",
    "cause": "host-python",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "for j in range(len(labels))",
        "distances = torch.cdist(z, z).tolist()",
        "if labels[i] == labels[j]",
        "elif distances[i][j]",
        "hardest(",
        "if distances[i][j] > far",
        "far, positive = distances",
        "near, negative = distances",
    ],
    "share": 53,
    "remedy": "mask the matrix of distances, and take amax and amin",
    "without": [
        [
            "        anchors, positives, negatives = hardest(z.detach(), y.tolist())\n",
            "        d, same = torch.cdist(z.detach(), z.detach()), y[:, None] == y\n        anchors, positives, negatives = torch.arange(len(y)), (d * same).argmax(1), (d + 1e9 * same).argmin(1)\n",
        ]
    ],
}


def hardest(z, labels):
    distances = torch.cdist(z, z).tolist()
    positives, negatives = [], []
    for i in range(len(labels)):
        far, near = -1.0, float("inf")
        positive = negative = i
        for j in range(len(labels)):
            if labels[i] == labels[j]:
                if distances[i][j] > far:
                    far, positive = distances[i][j], j
            elif distances[i][j] < near:
                near, negative = distances[i][j], j
        positives.append(positive)
        negatives.append(negative)
    return list(range(len(labels))), positives, negatives


class Embedder(nn.Module):
    def __init__(self, n_in=96, n_out=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, n_out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class MetricTrainer:
    def __init__(self, model, margin=0.2, lr=1e-3):
        self.model, self.margin = model, margin
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.callbacks = []

    def loss(self, x, y):
        z = self.model(x)
        anchors, positives, negatives = hardest(z.detach(), y.tolist())
        return F.triplet_margin_loss(z[anchors], z[positives], z[negatives], margin=self.margin)

    def fit(self, batches):
        for step, (x, y) in enumerate(batches):
            loss = self.loss(x, y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback(step, loss)


def batches(count, classes=12, size=240):
    centres = torch.randn(classes, 96)
    for _ in range(count):
        y = torch.randint(0, classes, (size,))
        yield centres[y] + torch.randn(size, 96), y


if __name__ == "__main__":
    torch.manual_seed(1)
    trainer = MetricTrainer(Embedder())
    trainer.callbacks.append(lambda step, loss: step % 40 or print(f"{step:4d} {loss.item():.4f}"))
    trainer.fit(batches(120))
