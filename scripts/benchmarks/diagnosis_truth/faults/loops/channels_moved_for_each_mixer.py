"""Labels each pixel of hyperspectral pictures with a network of pointwise layers; pictures come from a generator."""

import itertools

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Pixels have their channels last for LayerNorm, and each block moves them to the front and back for convolutions of one pixel, with a copy each time; a linear layer does the same without any.",
    "cause": "layout-conversion",
    "also": ["needless-copies"],
    "never": ["data-loading", "host-python", "growth", "start-up", "logging", "no-update", "evaluation"],
    "healthy": False,
    "place": [
        "h = self.norm(x).permute(0, 3, 1, 2).contiguous()",
        "return x + self.mix(h).permute(0, 2, 3, 1).contiguous()",
        "self.mix = nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU())",
    ],
    "share": 52,
    "remedy": "use nn.Linear in place of the convolutions of one pixel, and leave the channels last",
    "without": [
        [
            "nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU())",
            "nn.Sequential(nn.Linear(width, width), nn.ReLU())",
        ],
        ["h = self.norm(x).permute(0, 3, 1, 2).contiguous()", "h = self.norm(x)"],
        ["self.mix(h).permute(0, 2, 3, 1).contiguous()", "self.mix(h)"],
    ],
}


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU())

    def forward(self, x):
        h = self.norm(x).permute(0, 3, 1, 2).contiguous()
        return x + self.mix(h).permute(0, 2, 3, 1).contiguous()


def build(bands, width, classes, depth):
    return nn.Sequential(nn.Linear(bands, width), *[Mixer(width) for _ in range(depth)], nn.Linear(width, classes))


def pictures(batch, side, bands, classes):
    """Yield pictures (batch × side × side × bands) and their labels, without end."""
    spectra = torch.randn(classes, bands)
    while True:
        labels = torch.randint(classes, (batch, side // 8, side // 8))
        labels = labels.repeat_interleave(8, 1).repeat_interleave(8, 2)
        yield spectra[labels] + torch.randn(batch, side, side, bands), labels


def train(steps=60, batch=8, side=64, bands=24, classes=9):
    torch.manual_seed(5)
    net = build(bands, 32, classes, depth=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
    for step, (x, y) in enumerate(itertools.islice(pictures(batch, side, bands, classes), steps)):
        loss = nn.functional.cross_entropy(net(x).flatten(0, 2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, round(loss.item(), 4))


if __name__ == "__main__":
    train()
