"""Segmentation of satellite tiles whose large batch does not fit at once, so that gradients are accumulated."""

import logging

import torch
import torch.nn as nn

CASE = {
    "generation": 13,
    "truth": "zero_grad() stands at the top of the loop over micro-batches, so each one throws away the gradients of the one before: of every four backward passes three are lost. Their time is spent for nothing.",
    "cause": "skipped-steps",
    "also": ["unused-gradients"],
    "never": ["data-loading", "evaluation", "growth", "host-python", "small-operators", "logging", "start-up"],
    "healthy": False,
    "place": ["            optimizer.zero_grad()", "loss.backward()"],
    "remedy": "clear the gradients after optimizer.step() only",
    "without": [
        ["            optimizer.zero_grad()\n", ""],
        [
            "                optimizer.step()\n",
            "                optimizer.step()\n                optimizer.zero_grad()\n",
        ],
    ],
}

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
logger = logging.getLogger("tiles")


class DoubleConv(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
        )


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 2 * width)
        self.up = DoubleConv(4 * width, width)
        self.out = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(nn.functional.max_pool2d(a, 2))
        c = self.bottom(nn.functional.max_pool2d(b, 2))
        d = self.up(torch.cat([nn.functional.interpolate(c, scale_factor=2), b], 1))
        return self.out(torch.cat([nn.functional.interpolate(d, scale_factor=2), a], 1))


def tiles(count, size=48):
    rows = torch.arange(size).view(1, size, 1)
    columns = torch.arange(size).view(1, 1, size)
    y, x = torch.randint(10, size - 10, (2, count, 1, 1))
    lake = ((rows - y) ** 2 + (columns - x) ** 2 < torch.randint(20, 90, (count, 1, 1))).float()
    image = torch.rand(count, 3, 1, 1) + 0.3 * torch.randn(count, 3, size, size)
    image[:, 2] += 0.6 * lake
    return image, lake.unsqueeze(1)


def train(epochs=5, micro_batch=4, accumulation_steps=4):
    torch.manual_seed(11)
    images, masks = tiles(160)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        total = 0.0
        parts = torch.randperm(len(images)).split(micro_batch)
        for i, part in enumerate(parts):
            optimizer.zero_grad()
            loss = criterion(model(images[part]), masks[part]) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
            total += loss.item() * accumulation_steps
        logger.info("epoch %d: loss %.4f", epoch + 1, total / len(parts))


if __name__ == "__main__":
    train()
