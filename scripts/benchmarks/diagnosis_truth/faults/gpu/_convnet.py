"""A residual network for images, and pictures of noise."""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short = nn.Identity() if stride == 1 and inside == outside else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def convnet(width=64, classes=100, depth=(2, 2, 2, 2)):
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = width
    for stage, blocks in enumerate(depth):
        outside = width * 2**stage
        for block in range(blocks):
            layers.append(Residual(inside, outside, 2 if stage and not block else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class Pictures(torch.utils.data.Dataset):
    def __init__(self, n=4096, size=224):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, self.size, self.size), dtype=torch.uint8, generator=generator), index % 100
