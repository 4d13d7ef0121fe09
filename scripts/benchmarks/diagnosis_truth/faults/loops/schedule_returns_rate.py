"""Contrastive learning of image features (two random views of a picture), with a warm-up and a cosine schedule."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

CASE = {
    "generation": 9,
    "truth": "The function given to LambdaLR returns the learning rate itself, but LambdaLR multiplies the optimizer's rate by it: steps are taken with 1e-6 instead of 1e-3 and the net hardly learns. Contrastive loss at the end 3.72, without the fault 1.16.",
    "cause": "learning-rate-too-small",
    "also": ["no-update"],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "start-up",
        "padding",
        "divergence",
        "nan-loss",
        "lost-state",
        "host-python",
        "skipped-steps",
    ],
    "healthy": False,
    "place": ["return base_rate * warm", "return base_rate * 0.5", "LambdaLR(optimizer,"],
    "remedy": "return a factor between 0 and 1 from the function",
    "without": [
        ["            return base_rate * warm\n", "            return warm\n"],
        ["        return base_rate * 0.5 * (1", "        return 0.5 * (1"],
    ],
}


class Encoder(nn.Module):
    def __init__(self, width=16, features=48, projected=32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, features, 3, 2, 1), nn.BatchNorm2d(features), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.project = nn.Sequential(nn.Linear(4 * features, 64), nn.ReLU(), nn.Linear(64, projected))

    def forward(self, x):
        return F.normalize(self.project(self.trunk(x)), dim=1)


def scenes(count, side=32):
    """Two coloured blobs on a ground of one colour."""
    axis = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    picture = torch.rand(count, 3, 1, 1).expand(-1, -1, side, side)
    for _ in range(2):
        centre = 1.2 * torch.rand(count, 2, 1, 1) - 0.6
        blob = torch.exp(
            -((y - centre[:, :1]) ** 2 + (x - centre[:, 1:]) ** 2) / (0.05 + 0.2 * torch.rand(count, 1, 1, 1))
        )
        picture = picture * (1 - blob) + torch.rand(count, 3, 1, 1) * blob
    return picture


def view(picture, pad=3):
    side = picture.shape[-1]
    dy, dx = torch.randint(2 * pad + 1, (2,)).tolist()
    moved = F.pad(picture, (pad,) * 4, mode="reflect")[..., dy : dy + side, dx : dx + side]
    bright = 0.7 + 0.6 * torch.rand(len(picture), 1, 1, 1)
    moved = moved * bright + 0.1 * torch.randn_like(moved)
    return moved.flip(3) if torch.rand(()) < 0.5 else moved


def contrast(a, b, temperature=0.2):
    n = len(a)
    both = torch.cat([a, b])
    similar = both @ both.t() / temperature
    similar.fill_diagonal_(-1e9)
    partner = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similar, partner)


def warm_up_then_cosine(base_rate, warm_up, steps):
    def at(step):
        if step < warm_up:
            warm = (step + 1) / warm_up
            return base_rate * warm
        done = (step - warm_up) / (steps - warm_up)
        return base_rate * 0.5 * (1 + math.cos(math.pi * done))

    return at


class Pretraining:
    def __init__(self, steps, base_rate=1e-3):
        self.steps = steps
        self.encoder = Encoder()
        optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=base_rate, weight_decay=1e-4)
        self.optimizer = optimizer
        self.scheduler = LambdaLR(optimizer, warm_up_then_cosine(base_rate, steps // 10, steps))

    def run(self, pictures, batch=40):
        for step in range(self.steps):
            picked = pictures[torch.randint(len(pictures), (batch,))]
            loss = contrast(self.encoder(view(picked)), self.encoder(view(picked)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            if step % 25 == 0:
                print(f"step {step}: contrastive loss {loss.item():.3f}")


if __name__ == "__main__":
    torch.manual_seed(12)
    Pretraining(steps=200).run(scenes(1000))
