"""Fault detection from machine sounds: few recordings, and gradients accumulated over eight batches."""

from dataclasses import dataclass, field

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "The optimizer steps after eight batches, counted anew in each epoch, but an epoch has six batches: it never steps, and each epoch begins by clearing what was accumulated.",
    "cause": "no-update",
    "also": ["skipped-steps", "gradients-not-cleared"],
    "never": ["data-loading", "host-python", "growth", "start-up", "logging", "evaluation", "small-operators"],
    "healthy": False,
    "place": ["if (i + 1) % self.settings.accumulate == 0:", "self.optimizer.step()", "self.optimizer.zero_grad()"],
    "remedy": "step after the last batch of an epoch as well: or i + 1 == len(batches)",
    "without": [
        [
            "if (i + 1) % self.settings.accumulate == 0:",
            "if (i + 1) % self.settings.accumulate == 0 or i + 1 == len(batches):",
        ]
    ],
}


@dataclass
class Settings:
    batch: int = 32
    accumulate: int = 8
    epochs: int = 16
    lr: float = 1e-3
    widths: list = field(default_factory=lambda: [1, 24, 48, 64])


class SoundNet(nn.Module):
    def __init__(self, widths):
        super().__init__()
        layers = []
        for a, b in zip(widths, widths[1:]):
            layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(8, b), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(widths[-1], 2)

    def forward(self, x):
        return self.head(self.body(x))


class Fitter:
    def __init__(self, settings, x, y):
        self.settings, self.x, self.y = settings, x, y
        self.net = SoundNet(settings.widths)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=settings.lr, fused=True)
        self.history = []

    def train_epoch(self):
        batches = torch.randperm(len(self.x)).split(self.settings.batch)
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for i, rows in enumerate(batches):
            loss = nn.functional.cross_entropy(self.net(self.x[rows]), self.y[rows])
            (loss / self.settings.accumulate).backward()
            total += loss.detach()
            if (i + 1) % self.settings.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return total / len(batches)

    def fit(self):
        for epoch in range(self.settings.epochs):
            self.history.append(self.train_epoch().item())
            if epoch % 4 == 3:
                print("epoch", epoch + 1, "loss", round(self.history[-1], 4))


def recordings(count):
    y = torch.randint(2, (count,))
    hum = torch.sin(torch.arange(64.0).view(1, 64, 1) * (0.4 + 0.2 * y.view(-1, 1, 1)))
    return (hum + 0.7 * torch.randn(count, 64, 64)).unsqueeze(1), y


if __name__ == "__main__":
    torch.manual_seed(2)
    Fitter(Settings(), *recordings(192)).fit()
