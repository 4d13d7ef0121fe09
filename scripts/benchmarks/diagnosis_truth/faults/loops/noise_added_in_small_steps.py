"""Denoising diffusion on small pictures of rings: a convolutional network predicts the noise at a random level."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "A noisy picture of level t is made by t single noising steps in a Python loop with fresh noise for each, although the product of the alphas gives it in one step.",
    "cause": "small-operators",
    "also": ["elementwise-chain", "host-python", "data-loading"],
    "never": ["logging", "evaluation", "growth", "no-update", "start-up", "unfused-optimizer", "padding"],
    "healthy": False,
    "place": [
        "for s in range(int(level.max()) + 1):",
        "moved = ",
        "torch.randn_like(x)",
        "x = torch.where(",
        "noisy, noise = process.diffuse(",
    ],
    "share": 34,
    "remedy": "x = sqrt(alpha_bar) * clean + sqrt(1 - alpha_bar) * noise",
    "without": [
        [
            """        x = clean
        for s in range(int(level.max()) + 1):
            moved = (1 - self.betas[s]).sqrt() * x + self.betas[s].sqrt() * torch.randn_like(x)
            x = torch.where((level >= s).view(-1, 1, 1, 1), moved, x)
        kept = self.kept[level].view(-1, 1, 1, 1)
        return x, (x - kept.sqrt() * clean) / (1 - kept).sqrt()
""",
            """        kept = self.kept[level].view(-1, 1, 1, 1)
        noise = torch.randn_like(clean)
        return kept.sqrt() * clean + (1 - kept).sqrt() * noise, noise
""",
        ]
    ],
}


class Process:
    def __init__(self, levels=130):
        self.levels = levels
        self.betas = torch.linspace(7e-4, 0.045, levels)
        self.kept = torch.cumprod(1 - self.betas, 0)

    def diffuse(self, clean, level):
        x = clean
        for s in range(int(level.max()) + 1):
            moved = (1 - self.betas[s]).sqrt() * x + self.betas[s].sqrt() * torch.randn_like(x)
            x = torch.where((level >= s).view(-1, 1, 1, 1), moved, x)
        kept = self.kept[level].view(-1, 1, 1, 1)
        return x, (x - kept.sqrt() * clean) / (1 - kept).sqrt()


def embed(level, dim=32):
    rate = torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    angle = level[:, None].float() * rate
    return torch.cat([angle.sin(), angle.cos()], 1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.shift = nn.Linear(32, width)

    def forward(self, x, code):
        return x + self.conv(F.silu(self.norm(x) + self.shift(code)[:, :, None, None]))


class Denoiser(nn.Module):
    def __init__(self, width=20, depth=2):
        super().__init__()
        self.inward = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.outward = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, level):
        code, x = embed(level), self.inward(x)
        for block in self.blocks:
            x = block(x, code)
        return self.outward(F.silu(x))


def rings(count, side=16):
    axis = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    centre = 0.4 * torch.randn(count, 2, 1, 1)
    radius = 0.3 + 0.5 * torch.rand(count, 1, 1)
    distance = ((x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2).sqrt()
    return (2 * torch.exp(-(((distance - radius) / 0.12) ** 2)) - 1).unsqueeze(1)


def main(steps=120, batch=20):
    torch.manual_seed(21)
    process, net, pictures = Process(), Denoiser(), rings(1024)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    mean = None
    for step in range(1, steps + 1):
        clean = pictures[torch.randint(len(pictures), (batch,))]
        level = torch.randint(process.levels, (batch,))
        noisy, noise = process.diffuse(clean, level)
        loss = F.mse_loss(net(noisy, level), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() if mean is None else torch.lerp(mean, loss.detach(), 0.1)
        if step % 30 == 0:
            print(f"step {step}: error of the noise {mean:.3f}")


if __name__ == "__main__":
    main()
