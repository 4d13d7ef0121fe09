"""Denoising diffusion of small pictures (rings and crosses), with a net that predicts the noise."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 9,
    "truth": "The generator of noise is seeded with the same number in every training step, so each batch gets the same noise levels and the same noise: the net learns that one noise by heart. Error on held-out pictures with other noise at the end 0.187, without the fault 0.108.",
    "cause": "same-randomness",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "start-up",
        "padding",
        "no-update",
        "divergence",
        "nan-loss",
        "lost-state",
        "host-python",
    ],
    "healthy": False,
    "place": ["dice = torch.Generator().manual_seed(self.seed)", "def corrupt(self, clean):"],
    "remedy": "make the generator once, before the loop, and let it run on",
    "without": [
        ["        self.seed = seed\n", "        self.dice = torch.Generator().manual_seed(seed)\n"],
        ["        dice = torch.Generator().manual_seed(self.seed)\n", "        dice = self.dice\n"],
    ],
}


class Diffusion:
    def __init__(self, levels=200, seed=0):
        self.levels = levels
        self.seed = seed
        angle = (torch.arange(levels) / levels + 0.01) / 1.02 * math.pi / 2
        self.signal, self.noise = torch.cos(angle), torch.sin(angle)

    def corrupt(self, clean):
        dice = torch.Generator().manual_seed(self.seed)
        level = torch.randint(self.levels, (len(clean),), generator=dice)
        noise = torch.randn(clean.shape, generator=dice)
        view = (-1, 1, 1, 1)
        return self.signal[level].view(view) * clean + self.noise[level].view(view) * noise, level, noise


class Residual(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.context = nn.Linear(context, width)

    def forward(self, x, context):
        h = self.one(F.silu(self.norm(x))) + self.context(context)[:, :, None, None]
        return x + self.two(F.silu(h))


class NoiseNet(nn.Module):
    def __init__(self, width=32, blocks=3, context=32):
        super().__init__()
        self.register_buffer("rates", torch.exp(torch.linspace(0, 5, context // 2)))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(width, context) for _ in range(blocks)])
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, level):
        phase = level[:, None] * self.rates / 200
        context = torch.cat([phase.sin(), phase.cos()], 1)
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, context)
        return self.leave(F.silu(h))


def pictures(count, side=16):
    axis = torch.arange(side) - side / 2 + 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    at, size = 4 * torch.rand(count, 2, 1, 1) - 2, 3 + 2 * torch.rand(count, 1, 1)
    dy, dx = y - at[:, 0], x - at[:, 1]
    ring = (((dy**2 + dx**2).sqrt() - size).abs() < 1).float()
    cross = ((torch.minimum(dy.abs(), dx.abs()) < 1) & (torch.maximum(dy.abs(), dx.abs()) < size)).float()
    return (2 * torch.where(torch.rand(count, 1, 1) < 0.5, ring, cross) - 1).unsqueeze(1)


def main(epochs=5, batch=16):
    torch.manual_seed(9)
    data, held_out = pictures(800), pictures(64)
    diffusion = Diffusion(seed=9)
    net = NoiseNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(epochs):
        total, steps = 0.0, 0
        for pick in torch.randperm(len(data)).split(batch):
            noisy, level, noise = diffusion.corrupt(data[pick])
            loss = F.mse_loss(net(noisy, level), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        print(f"epoch {epoch}: loss {total / steps:.4f}")
    with torch.no_grad():
        noisy, level, noise = Diffusion(seed=123).corrupt(held_out)
        print(f"held out: {F.mse_loss(net(noisy, level), noise):.4f}")


if __name__ == "__main__":
    main()
