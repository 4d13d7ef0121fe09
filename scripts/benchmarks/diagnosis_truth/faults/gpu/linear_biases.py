"""A language model with attention that knows positions by a linear bias for each head only."""

import math
import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "Each layer builds the same bias (16 x 512 x 512) with the CPU in every forward and copies it to the GPU "
    "from pageable memory; the GPU waits meanwhile. Measured: 55%.",
    "cause": "pageable-copies",
    "also": ["exposed-copies", "host-sync", "host-python", "small-operators", "launch-bound", "casts"],
    "never": ["data-loading", "fp32-products", "logging", "evaluation"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["linear_bias(self.heads, length)"],
}

STEPS = 50
BATCH = 32
LENGTH = 512
WIDTH = 1024
LAYERS = 4
VOCABULARY = 16384
device = "cuda" if torch.cuda.is_available() else "cpu"


def linear_bias(heads, length):
    slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
    positions = torch.arange(length)
    distance = positions[None, :] - positions[:, None]
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(distance > 0, -math.inf)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = linear_bias(self.heads, length).to(q.device, q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.after = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(VOCABULARY, WIDTH),
    *[Layer(WIDTH, 16) for _ in range(LAYERS)],
    nn.LayerNorm(WIDTH),
    nn.Linear(WIDTH, VOCABULARY, bias=False),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), fused=True)
corpus = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1), device=device)

for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    inputs, targets = corpus[step, :, :-1], corpus[step, :, 1:]
    with torch.autocast(device, torch.bfloat16):
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
elapsed = clock() - start
print(f"loss {loss.item():.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
