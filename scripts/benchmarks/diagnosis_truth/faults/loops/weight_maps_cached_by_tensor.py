"""Segmentation of cells under a microscope; pixels between close cells weigh more in the loss, as in the first U-Net."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 9,
    "truth": "The weight map of a mask is kept by lru_cache with the tensor as its key; a tensor is hashed by identity and each look-up makes a new one, so the cache never hits: all maps are computed again and all are kept.",
    "cause": "data-loading",
    "also": ["growth", "small-operators", "elementwise-chain"],
    "never": ["logging", "evaluation", "start-up", "padding", "no-update", "checkpoint-writing", "dense-gradient"],
    "healthy": False,
    "place": [
        "@functools.lru_cache(maxsize=None)",
        "def border_weights(mask",
        "border_weights(mask)",
        "def __getitem__(self, index):",
    ],
    "share": 54,
    "remedy": "compute the map once per sample and keep it under the sample's index",
    "without": [
        [
            "        self.images, self.masks = draw_cells(count, side)\n",
            "        self.images, self.masks = draw_cells(count, side)\n        self.maps = [border_weights(m) for m in self.masks]\n",
        ],
        [
            "        return self.images[index], mask, border_weights(mask)\n",
            "        return self.images[index], mask, self.maps[index]\n",
        ],
    ],
}


def draw_cells(count, side, cells=7):
    axis = torch.arange(side, dtype=torch.float)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    masks = torch.zeros(count, 1, side, side)
    for i in range(count):
        for _ in range(cells):
            cy, cx = torch.rand(2) * side
            radius = 4 + 5 * torch.rand(1)
            masks[i, 0][(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = 1
    smooth = F.avg_pool2d(masks, 5, 1, 2)
    return 0.6 * smooth + 0.25 * torch.randn(count, 1, side, side), masks


@functools.lru_cache(maxsize=None)
def border_weights(mask, reach=24, sigma=5.0, strength=8.0):
    """Distance to the closest cell, pixel by pixel, by growing the cells ring after ring."""
    grown = mask[None]
    distance = torch.full_like(grown, float(reach))
    distance[grown > 0] = 0
    for ring in range(1, reach):
        wider = F.max_pool2d(grown, 3, 1, 1)
        distance = torch.where((wider > 0) & (grown == 0), torch.full_like(distance, float(ring)), distance)
        grown = wider
    weights = 1 + strength * torch.exp(-(distance**2) / (2 * sigma**2)) * (distance > 0)
    return weights[0]


class Cells(Dataset):
    def __init__(self, count, side):
        self.images, self.masks = draw_cells(count, side)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        mask = self.masks[index]
        return self.images[index], mask, border_weights(mask)


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class SmallUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 2 * width)
        self.up = block(4 * width, width)
        self.last = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        u = self.up(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.last(torch.cat([F.interpolate(u, scale_factor=2), a], 1))


def main(epochs=3, batch=4):
    torch.manual_seed(5)
    loader = DataLoader(Cells(160, 64), batch_size=batch, shuffle=True)
    net = SmallUNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        total = 0.0
        for image, mask, weight in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(net(image), mask, weight=weight)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
