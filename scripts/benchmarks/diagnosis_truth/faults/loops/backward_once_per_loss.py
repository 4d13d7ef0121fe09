"""Multi-task learning: one convolutional trunk, a head and a loss for each of eight attributes of an image."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 4,
    "truth": "Each of eight losses has a backward call of its own with retain_graph=True: eight times through the trunk.",
    "cause": "repeated-backward",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "logging", "host-python"],
    "healthy": False,
    "place": ["loss.backward(retain_graph=True)", "for name, loss in losses.items()"],
    "share": 79,
    "remedy": "add the losses, and call backward once",
    "without": [
        [
            "            for name, loss in losses.items():\n                loss.backward(retain_graph=True)\n",
            "            sum(losses.values()).backward()\n            for name, loss in losses.items():\n",
        ]
    ],
}

TASKS = {"hair": 6, "age": 9, "pose": 5, "glasses": 2, "hat": 2, "smile": 2, "beard": 3, "light": 4}


class Faces(Dataset):
    def __init__(self, n, size=28):
        g = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=g)
        self.labels = {t: torch.randint(0, k, (n,), generator=g) for t, k in TASKS.items()}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i].float() / 255, {t: v[i] for t, v in self.labels.items()}


class ConvBlock(nn.Module):
    def __init__(self, n_in, n_out, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(4, n_out)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class MultiTask(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.trunk = nn.Sequential(
            ConvBlock(3, width),
            ConvBlock(width, 2 * width, 2),
            ConvBlock(2 * width, 2 * width),
            ConvBlock(2 * width, 64, 2),
        )
        self.heads = nn.ModuleDict({t: nn.Linear(64, k) for t, k in TASKS.items()})

    def forward(self, x):
        h = self.trunk(x).mean(dim=(2, 3))
        return {t: head(h) for t, head in self.heads.items()}


def train(args):
    torch.manual_seed(0)
    loader = DataLoader(Faces(args.images), args.batch_size, shuffle=True)
    model = MultiTask()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    weights = {t: 1.0 / k for t, k in TASKS.items()}
    for epoch in range(args.epochs):
        sums = dict.fromkeys(TASKS, 0.0)
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = model(images)
            losses = {t: weights[t] * F.cross_entropy(outputs[t], labels[t]) for t in TASKS}
            for name, loss in losses.items():
                loss.backward(retain_graph=True)
                sums[name] += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        print(epoch, {t: round(s / len(loader), 3) for t, s in sums.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    train(parser.parse_args())
