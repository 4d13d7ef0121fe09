"""Super-resolution with a perceptual loss: pictures are compared at four depths of a fixed network."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn, optim

CASE = {
    "generation": 5,
    "truth": "For each of four depths the fixed network runs anew from its first layer, for the same pictures: twice the work of one pass.",
    "cause": "duplicate-forward",
    "also": ["unused-gradients"],
    "never": ["start-up", "data-loading", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "self.features[:depth](",
        "mine = ",
        "wanted = ",
        "for depth in self.depths",
        "criterion(",
    ],
    "share": 51,
    "remedy": "run the fixed network once and keep its outputs at the four depths",
    "without": [
        [
            "        for depth in self.depths:\n"
            "            mine = self.features[:depth](output)\n"
            "            with torch.no_grad():\n"
            "                wanted = self.features[:depth](target)\n"
            "            total = total + F.l1_loss(mine, wanted)\n",
            "        mine, wanted = output, target\n"
            "        for number, layer in enumerate(self.features, 1):\n"
            "            mine = layer(mine)\n"
            "            with torch.no_grad():\n"
            "                wanted = layer(wanted)\n"
            "            if number in self.depths:\n"
            "                total = total + F.l1_loss(mine, wanted)\n",
        ]
    ],
}


def conv(n_in: int, n_out: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(n_in, n_out, 3, stride, 1), nn.LeakyReLU(0.1)]


class PerceptualLoss(nn.Module):
    """Differences of features, as of a pretrained network, which is fixed."""

    depths = (2, 4, 6, 8)

    def __init__(self, width: int = 24):
        super().__init__()
        self.features = nn.Sequential(
            *conv(3, width), *conv(width, width), *conv(width, 2 * width, 2), *conv(2 * width, 2 * width)
        )
        self.features.requires_grad_(False).eval()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = F.l1_loss(output, target)
        for depth in self.depths:
            mine = self.features[:depth](output)
            with torch.no_grad():
                wanted = self.features[:depth](target)
            total = total + F.l1_loss(mine, wanted)
        return total


class Upscaler(nn.Module):
    def __init__(self, width: int = 24, scale: int = 2):
        super().__init__()
        self.scale = scale
        self.body = nn.Sequential(*conv(3, width), *conv(width, width), nn.Conv2d(width, 3 * scale**2, 3, padding=1))

    def forward(self, small: torch.Tensor) -> torch.Tensor:
        coarse = F.interpolate(small, scale_factor=self.scale, mode="bilinear", align_corners=False)
        return coarse + F.pixel_shuffle(self.body(small), self.scale)


def textures(size: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of small and large pictures of waves, without end."""
    line = torch.linspace(0, 1, size)
    while True:
        frequency = 3 + 25 * torch.rand(batch, 3, 2, 1, 1)
        large = torch.sin(frequency[:, :, 0] * line[:, None] + frequency[:, :, 1] * line[None, :] ** 2)
        yield F.avg_pool2d(large, 2), large


def main() -> None:
    torch.manual_seed(3)
    model, criterion = Upscaler(), PerceptualLoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=90)
    for number, (small, large) in zip(range(90), textures(64, 8)):
        optimizer.zero_grad()
        loss = criterion(model(small), large)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if number % 15 == 0:
            print(f"{number:3d} perceptual {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.1e}")


if __name__ == "__main__":
    main()
