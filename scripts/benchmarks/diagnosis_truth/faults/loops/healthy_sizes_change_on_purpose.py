"""Weeds in pictures of a field: the size of the pictures changes every eight steps, so that the detector knows all scales."""

import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "The pictures get another size every eight steps on purpose, so the time of a step changes in stages; convolutions take nearly all of it.",
    "cause": None,
    "also": [],
    "never": [
        "growth",
        "recompilation",
        "autotuning",
        "periodic-pause",
        "data-loading",
        "padding",
        "layout-conversion",
        "start-up",
        "garbage-collection",
        "divergence",
    ],
    "healthy": True,
}

SIZES = (48, 64, 80, 96)


def field(count, side=96):
    """Return pictures of soil, rows of crop and spots of weeds, and a map of the weeds."""
    place = torch.arange(side).float()
    rows = torch.sin(place / 5 + 6 * torch.rand(count, 1))[:, None].expand(-1, side, -1)
    x, y = torch.rand(2, count, 6, 1, 1) * side
    radius = 3 + 5 * torch.rand(count, 6, 1, 1)
    spots = (((place - x) ** 2 + (place[:, None] - y) ** 2) < radius**2).any(1).float()
    green = 0.4 * rows + 0.7 * spots
    noise = 0.3 * torch.randn(count, 3, side, side)
    return torch.stack([0.3 - 0.2 * spots, green, 0.1 * rows], 1) + noise, spots[:, None]


class Segmenter(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.BatchNorm2d(4 * width), nn.ReLU(),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.BatchNorm2d(4 * width), nn.ReLU(),
        )  # fmt: skip
        self.up = nn.ConvTranspose2d(4 * width, 1, 4, stride=4)

    def forward(self, pictures):
        return self.up(self.down(pictures))


def main(steps=96, batch=8):
    torch.manual_seed(75)
    random.seed(75)
    pictures, weeds = field(200)
    model = Segmenter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    side = SIZES[-1]
    for step in range(1, steps + 1):
        if step % 8 == 0:
            side = random.choice(SIZES)
        pick = torch.randint(len(pictures), (batch,))
        some, wanted = pictures[pick], weeds[pick]
        if side != some.shape[-1]:
            some = F.interpolate(some, size=(side, side), mode="bilinear", antialias=False)
            wanted = F.interpolate(wanted, size=(side, side), mode="nearest")
        loss = F.binary_cross_entropy_with_logits(model(some), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 24 == 0:
            print(f"step {step}: size {side}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
