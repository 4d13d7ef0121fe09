"""Recognises spoken commands in spectrograms with depthwise-separable convolutions."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "The one-cycle schedule is laid out for all batches, but it is stepped once an epoch only: the rate stays at the very beginning of its warm-up, at a twenty-fifth of what was asked for.",
    "cause": "learning-rate-too-small",
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
    "place": ["self.schedule.step()", "OneCycleLR("],
    "remedy": "step the schedule after each batch",
    "without": [
        [
            "                self.optimizer.step()\n",
            "                self.optimizer.step()\n                self.schedule.step()\n",
        ],
        ["            self.schedule.step()\n            print(", "            print("],
    ],
}


def separable(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.BatchNorm2d(inputs), nn.ReLU(),
        nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


class CommandNet(nn.Module):
    def __init__(self, commands, width=24):
        super().__init__()
        self.stem = nn.Conv2d(1, width, (5, 5), (2, 2), 2)
        self.blocks = nn.Sequential(
            separable(width, width, 1), separable(width, 2 * width, 2), separable(2 * width, 2 * width, 1)
        )
        self.head = nn.Linear(2 * width, commands)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def spoken(count, commands=12, mels=32, frames=40):
    """Two formants glide through the picture, in a way that depends on the command; loudness and onset vary."""
    path = torch.Generator().manual_seed(0)
    start, end = (mels * torch.rand(commands, 2, generator=path) for _ in range(2))
    label = torch.randint(commands, (count,))
    time = torch.linspace(0, 1, frames)
    onset = 0.2 * torch.rand(count, 1, 1)
    along = (time - onset).clamp(min=0)
    pitch = start[label][:, :, None] + (end - start)[label][:, :, None] * along + 0.7 * torch.randn(count, 2, 1)
    mel = torch.arange(mels)[:, None]
    energy = torch.exp(-0.5 * (mel - pitch[:, :, None]) ** 2 / 2).sum(1)
    return (energy * (0.5 + torch.rand(count, 1, 1)) + 0.5 * torch.randn(count, mels, frames)).unsqueeze(1), label


class Trainer:
    def __init__(self, epochs=6, batch=20, top_rate=0.03):
        self.epochs, self.batch = epochs, batch
        self.sounds, self.labels = spoken(800)
        self.model = CommandNet(12)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=top_rate, momentum=0.9, weight_decay=1e-4)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=top_rate, epochs=epochs, steps_per_epoch=len(self.sounds) // batch
        )

    def epoch(self):
        order = torch.randperm(len(self.sounds))
        for pick in order.split(self.batch):
            yield self.sounds[pick], self.labels[pick]

    def fit(self):
        for epoch in range(self.epochs):
            self.model.train()
            right, total = 0, 0.0
            for sounds, labels in self.epoch():
                logits = self.model(sounds)
                loss = F.cross_entropy(logits, labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                right += (logits.argmax(1) == labels).sum().item()
                total += loss.item()
            self.schedule.step()
            print(
                f"epoch {epoch}: loss {total * self.batch / len(self.sounds):.3f}, accuracy {right / len(self.sounds):.3f}"
            )


if __name__ == "__main__":
    torch.manual_seed(2)
    Trainer().fit()
