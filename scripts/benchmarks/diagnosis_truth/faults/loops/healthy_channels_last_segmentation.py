"""Finds cells in pictures of a microscope with a small U-Net, whose convolutions have channels last."""

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Network and pictures are moved to channels last, each batch once at its beginning, where it has a single channel and costs nothing; skip connections are concatenated as a U-Net needs. Convolutions take the time.",
    "cause": None,
    "also": [],
    "never": ["layout-conversion", "needless-copies", "casts", "data-loading", "host-python", "elementwise-chain"],
    "healthy": True,
}


def twice(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(True), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(True))


class UNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.down1, self.down2, self.low = twice(1, width), twice(width, 2 * width), twice(2 * width, 2 * width)
        self.up2, self.up1 = twice(4 * width, width), twice(2 * width, width)
        self.pool, self.rise = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="nearest")
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.low(self.pool(b))
        b = self.up2(torch.cat([self.rise(c), b], 1))
        return self.out(self.up1(torch.cat([self.rise(b), a], 1)))


def cells(batch, side):
    """Return pictures with one round cell each, and masks of them."""
    place = torch.linspace(0, 1, side)
    y, x, r = (torch.rand(3, batch, 1, 1, 1) * 0.5 + 0.25).unbind(0)
    mask = ((place.view(1, 1, -1, 1) - y) ** 2 + (place - x) ** 2 < (r / 3) ** 2).float()
    return mask + 0.6 * torch.randn(batch, 1, side, side), mask


def dice(logits, mask):
    p = logits.sigmoid()
    return 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum())


if __name__ == "__main__":
    torch.manual_seed(26)
    net = UNet().to(memory_format=torch.channels_last)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
    for step in range(1, 61):
        image, mask = cells(4, 64)
        logits = net(image.to(memory_format=torch.channels_last))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, mask) + dice(logits, mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 0:
            print(f"step {step}: {loss.item():.4f}")
