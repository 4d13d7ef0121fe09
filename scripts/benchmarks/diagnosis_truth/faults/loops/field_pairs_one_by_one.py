"""Clicks on advertisements: factorisation machine and a deep part over twelve categorical fields, with callbacks."""

import itertools

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "The interaction of each pair of the twelve fields is a product and a sum of its own: 66 pairs of tiny operators, where the square of the sum minus the sum of squares gives the same.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": ["data-loading", "growth", "start-up", "logging", "no-update", "evaluation", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "second = second + (fields[:, i] * fields[:, j]).sum(1)",
        "for i, j in itertools.combinations(range(fields.shape[1]), 2):",
        "logit = self.first(rows).sum(1).squeeze(1) + pairs(fields) + self.deep(fields.flatten(1)).squeeze(1)",
    ],
    "share": 40,
    "remedy": "0.5 * (fields.sum(1) ** 2 - (fields ** 2).sum(1)).sum(1)",
    "without": [
        [
            "    second = torch.zeros(len(fields))\n    for i, j in itertools.combinations(range(fields.shape[1]), 2):\n        second = second + (fields[:, i] * fields[:, j]).sum(1)\n    return second\n",
            "    return 0.5 * (fields.sum(1) ** 2 - (fields**2).sum(1)).sum(1)\n",
        ]
    ],
}


def pairs(fields):
    second = torch.zeros(len(fields))
    for i, j in itertools.combinations(range(fields.shape[1]), 2):
        second = second + (fields[:, i] * fields[:, j]).sum(1)
    return second


class DeepFM(nn.Module):
    def __init__(self, sizes, width=12):
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, *itertools.accumulate(sizes)][:-1]))
        self.first = nn.Embedding(sum(sizes), 1)
        self.factors = nn.Embedding(sum(sizes), width)
        nn.init.normal_(self.factors.weight, std=0.05)
        self.deep = nn.Sequential(
            nn.Linear(width * len(sizes), 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1)
        )

    def forward(self, x):
        rows = x + self.offsets
        fields = self.factors(rows)
        logit = self.first(rows).sum(1).squeeze(1) + pairs(fields) + self.deep(fields.flatten(1)).squeeze(1)
        return logit


class Printer:
    def on_step_end(self, step, loss):
        if step % 25 == 0:
            print(f"{step:4d} logloss {loss.item():.4f}")


class EarlyStop:
    def __init__(self, patience):
        self.best, self.patience, self.bad = float("inf"), patience, 0

    def on_epoch_end(self, mean):
        self.bad = 0 if mean < self.best else self.bad + 1
        self.best = min(self.best, mean)
        return self.bad > self.patience


def fit(model, x, y, epochs, batch, callbacks):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True)
    step = 0
    for _ in range(epochs):
        total = torch.zeros(())
        for rows in torch.randperm(len(x)).split(batch):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            for callback in callbacks:
                if hasattr(callback, "on_step_end"):
                    callback.on_step_end(step, loss)
        if any(c.on_epoch_end(total.item()) for c in callbacks if hasattr(c, "on_epoch_end")):
            break


if __name__ == "__main__":
    torch.manual_seed(31)
    sizes = [20 + 15 * k for k in range(12)]
    x = torch.stack([torch.randint(size, (512 * 25,)) for size in sizes], 1)
    y = ((x[:, 3] % 2) ^ (x[:, 7] % 2)).float()
    fit(DeepFM(sizes), x, y, epochs=4, batch=512, callbacks=[Printer(), EarlyStop(2)])
