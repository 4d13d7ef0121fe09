"""Segmentation of cells in microscope pictures from random crops, with bends as augmentation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 17,
    "truth": "Each picture of 384 by 384 pixels is bent as a whole, with its mask, and all but a crop of 64 by 64 is thrown away afterwards: 36% of the loop's time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "dense-gradient", "padding"],
    "healthy": False,
    "place": [
        "picture = F.grid_sample(picture[None], field, align_corners=False)[0]",
        'mask = F.grid_sample(mask[None], field, mode="nearest", align_corners=False)[0]',
        "rough = torch.randn(1, 2, 12, 12) * self.bend / size",
        'field = F.interpolate(rough, (size, size), mode="bicubic", align_corners=True)',
        "pair = change(*pair)",
        "for pictures, masks in loader:",
    ],
    "share": 36,
    "remedy": "crop first, with a margin as wide as the bend, and bend the crop",
    "without": [["Compose([Bend(), Crop(64)])", "Compose([Crop(80), Bend(), Crop(64)])"]],
}


class Bend:
    """Moves pixels by a smooth random field."""

    def __init__(self, bend=6.0):
        self.bend = bend

    def __call__(self, picture, mask):
        size = picture.shape[-1]
        rough = torch.randn(1, 2, 12, 12) * self.bend / size
        field = F.interpolate(rough, (size, size), mode="bicubic", align_corners=True)
        line = torch.linspace(-1 + 1 / size, 1 - 1 / size, size)
        y, x = torch.meshgrid(line, line, indexing="ij")
        field = torch.stack([x, y], -1)[None] + field.permute(0, 2, 3, 1)
        picture = F.grid_sample(picture[None], field, align_corners=False)[0]
        mask = F.grid_sample(mask[None], field, mode="nearest", align_corners=False)[0]
        return picture, mask


class Crop:
    def __init__(self, size):
        self.size = size

    def __call__(self, picture, mask):
        top, left = torch.randint(picture.shape[-1] - self.size + 1, (2,)).tolist()
        window = (..., slice(top, top + self.size), slice(left, left + self.size))
        return picture[window], mask[window]


class Compose:
    def __init__(self, changes):
        self.changes = changes

    def __call__(self, *pair):
        for change in self.changes:
            pair = change(*pair)
        return pair


class Slides(Dataset):
    """Round cells, lighter than their ground, under noise."""

    def __init__(self, count, change, size=384):
        self.change = change
        line = torch.arange(size)
        y, x = torch.meshgrid(line, line, indexing="ij")
        self.masks = torch.zeros(count, 1, size, size)
        for mask in self.masks:
            for top, left, radius in torch.rand(60, 3).tolist():
                mask[0][(y - top * size) ** 2 + (x - left * size) ** 2 < (6 + 14 * radius) ** 2] = 1
        self.pictures = 0.6 * self.masks + 0.4 * torch.randn_like(self.masks)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):
        return self.change(self.pictures[index], self.masks[index])


def double(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


class SmallUNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.first, self.second = double(1, width), double(width, 2 * width)
        self.last = double(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, pictures):
        fine = self.first(pictures)
        coarse = self.second(F.max_pool2d(fine, 2))
        return self.out(self.last(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1)))


def dice(scores, masks):
    found = torch.sigmoid(scores)
    return 1 - (2 * (found * masks).sum() + 1) / (found.sum() + masks.sum() + 1)


def main(epochs=8):
    torch.manual_seed(72)
    slides = Slides(48, Compose([Bend(), Crop(64)]))
    loader = DataLoader(slides, batch_size=6, shuffle=True)
    model = SmallUNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=epochs, power=0.9)
    for epoch in range(epochs):
        total = 0.0
        for pictures, masks in loader:
            scores = model(pictures)
            loss = F.binary_cross_entropy_with_logits(scores, masks) + dice(scores, masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
