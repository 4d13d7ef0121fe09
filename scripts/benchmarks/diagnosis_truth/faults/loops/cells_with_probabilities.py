"""Segmentation of microscope pictures into background, cell body and nucleus with a small U-Net."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "The network ends with a softmax over the classes, and cross_entropy takes the logarithm of a softmax again: gradients are flat, and the loss cannot fall below 0.55.",
    "cause": "double-softmax",
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
    "place": ["nn.Softmax2d()", "F.cross_entropy("],
    "remedy": "return the logits of the last convolution",
    "without": [
        ["nn.Sequential(nn.Conv2d(width, classes, 1), nn.Softmax2d())", "nn.Sequential(nn.Conv2d(width, classes, 1))"]
    ],
}


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, classes=3, width=12):
        super().__init__()
        self.down1 = double_conv(1, width)
        self.down2 = double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 2 * width)
        self.up2 = double_conv(4 * width, width)
        self.up1 = double_conv(2 * width, width)
        self.head = nn.Sequential(nn.Conv2d(width, classes, 1), nn.Softmax2d())

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        d = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.head(self.up1(torch.cat([F.interpolate(d, scale_factor=2), a], 1)))


def slides(count, side=40, cells=4):
    axis = torch.arange(side).float()
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    centre = side * torch.rand(count, cells, 2, 1, 1)
    radius = 4 + 5 * torch.rand(count, cells, 1, 1)
    distance = ((y - centre[:, :, 0]) ** 2 + (x - centre[:, :, 1]) ** 2).sqrt()
    body, nucleus = (distance < radius).any(1), (distance < 0.4 * radius).any(1)
    label = body.long() + (body & nucleus).long()
    shade = torch.tensor([0.1, 0.5, 0.8])[label]
    light = 0.3 * torch.rand(count, 1, 1)
    return (shade + light + 0.25 * torch.randn(count, side, side)).unsqueeze(1), label


def overlap(output, label, classes=3):
    guess = output.argmax(1)
    both = [
        ((guess == c) & (label == c)).sum() / ((guess == c) | (label == c)).sum().clamp(min=1) for c in range(classes)
    ]
    return torch.stack(both).mean().item()


def train(steps=100, batch=5):
    pictures, labels = slides(250)
    unseen = slides(48)
    net = UNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    order = torch.randperm(len(labels)).repeat(2)
    for step in range(steps):
        pick = order[step * batch : (step + 1) * batch]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(pictures[pick]), labels[pick])
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    net.eval()
    with torch.no_grad():
        print(f"mean overlap on unseen slides {overlap(net(unseen[0]), unseen[1]):.3f}")


if __name__ == "__main__":
    torch.manual_seed(14)
    train()
