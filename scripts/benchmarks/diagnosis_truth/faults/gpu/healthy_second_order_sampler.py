"""Latent pictures from noise by Heun's method; random weights."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "The denoiser runs twice in each step, as the method of second order demands, at different points; nearly "
    "all the time is products in bf16; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["duplicate-forward", "launch-bound", "host-sync", "fp32-products", "fp64-products", "unfused-attention"],
    "healthy": True,
    "requires": ["cuda"],
}

STEPS = 45
PICTURES = 32
PATCHES = 256
CHANNELS = 64
WIDTH = 2048
LAYERS = 6
device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(self.after(x)), inplace=True))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(CHANNELS, WIDTH)
        self.level = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.positions = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.layers = nn.Sequential(*[Layer(WIDTH, 16) for _ in range(LAYERS)])
        self.leave = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, sigma):
        scale = (sigma**2 + 0.25) ** -0.5
        level = self.level(sigma.log().to(torch.bfloat16).expand(len(x), 1, 1) / 4)
        hidden = self.enter((x * scale).to(torch.bfloat16)) + self.positions + level
        prediction = self.leave(self.layers(hidden)).float()
        return 0.25 * scale**2 * x + 0.5 * sigma * scale * prediction


def schedule(steps, low=0.002, high=80.0, rho=7):
    ramp = torch.linspace(0, 1, steps, device=device)
    sigmas = (high ** (1 / rho) + ramp * (low ** (1 / rho) - high ** (1 / rho))) ** rho
    return torch.cat([sigmas, sigmas.new_tensor([low / 10])])


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
with torch.device(device):
    model = Denoiser().to(torch.bfloat16).eval()
sigmas = schedule(STEPS)
with torch.inference_mode():
    x = torch.randn(PICTURES, PATCHES, CHANNELS, device=device) * sigmas[0]
    for step in range(STEPS):
        if step == STEPS - 20:
            start = clock()
        sigma, following = sigmas[step], sigmas[step + 1]
        slope = (x - model(x, sigma)) / sigma
        guess = x + (following - sigma) * slope
        second = (guess - model(guess, following)) / following
        x = x + (following - sigma) * (slope + second) / 2
elapsed = clock() - start
print(f"spread {x.std().item():.4f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
