"""Thirty-two latent pictures from as many captions, in sixty steps of denoising; random weights."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "The encoder of the captions, three times as deep as the denoiser, runs again on the same captions in "
    "each step of denoising. Measured: 54%.",
    "cause": "duplicate-forward",
    "also": ["launch-bound"],
    "never": ["data-loading", "host-sync", "fp32-products", "unfused-attention", "exposed-copies"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["self.captions("],
}

STEPS = 60
PICTURES = 32
PATCHES = 256
WORDS = 128
WIDTH = 1024
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self, width, heads=16):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, context):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(context).view(batch, context.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width, crossed=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if crossed else 2))
        self.attention = Attention(width)
        self.cross = Attention(width) if crossed else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, context=None):
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), context)
        return x + self.mlp(self.norms[1](x))


class Captions(nn.Module):
    def __init__(self, layers=24, vocabulary=32128):
        super().__init__()
        self.words = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Denoiser(nn.Module):
    def __init__(self, layers=8, channels=16):
        super().__init__()
        self.captions = Captions()
        self.enter = nn.Linear(channels, WIDTH)
        self.moment = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.positions = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Layer(WIDTH, crossed=True) for _ in range(layers))
        self.leave = nn.Linear(WIDTH, channels)

    def forward(self, latents, moment, ids):
        context = self.captions(ids)
        x = self.enter(latents) + self.positions + self.moment(moment)[:, None]
        for layer in self.layers:
            x = layer(x, context)
        return self.leave(x)


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
with torch.device(device):
    model = Denoiser().to(torch.bfloat16).eval()
ids = torch.randint(32128, (PICTURES, WORDS), device=device)
latents = torch.randn(PICTURES, PATCHES, 16, device=device)
moments = torch.linspace(1, 0, STEPS + 1).tolist()

with torch.inference_mode():
    for step in range(STEPS):
        if step == STEPS - 20:
            start = clock()
        now, then = moments[step], moments[step + 1]
        moment = torch.full((PICTURES, 1), now, dtype=torch.bfloat16, device=device)
        velocity = model(latents.to(torch.bfloat16), moment, ids)
        latents = latents + (then - now) * velocity.float()
elapsed = clock() - start
print(f"spread {latents.std().item():.4f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
