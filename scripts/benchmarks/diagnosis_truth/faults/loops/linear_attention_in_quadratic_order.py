"""Arrival times in long seismograms: attention without softmax over thousands of samples."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "The attention has no softmax, but its products are taken in the wrong order: queries with keys first, so that each head makes a matrix of all pairs of samples: 74% of the loop's time.",
    "cause": "slow-products",
    "also": ["unfused-attention"],
    "never": ["data-loading", "growth", "evaluation", "logging", "checkpoint-writing", "start-up", "small-operators"],
    "healthy": False,
    "place": [
        "pairs = query @ key.transpose(-2, -1)",
        "mixed = pairs @ value / pairs.sum(-1, keepdim=True)",
        "x = x + self.mix(self.first(x))",
    ],
    "share": 74,
    "remedy": "multiply keys with values first: query @ (key.transpose(-2, -1) @ value)",
    "without": [
        ["        pairs = query @ key.transpose(-2, -1)\n", ""],
        [
            "mixed = pairs @ value / pairs.sum(-1, keepdim=True)",
            "mixed = query @ (key.transpose(-2, -1) @ value) / (query @ key.sum(-2, keepdim=True).transpose(-2, -1))",
        ],
    ],
}

SAMPLES = 1024


def seismograms(count):
    """Return noise with an arrival, and the sample at which it begins."""
    start = torch.randint(SAMPLES // 8, SAMPLES - SAMPLES // 8, (count,))
    after = (torch.arange(SAMPLES) - start[:, None]).clamp(min=0).float()
    wave = torch.sin(after * 0.3) * torch.exp(-after / 120) * (after > 0)
    return (wave * 2 + 0.4 * torch.randn(count, SAMPLES))[..., None], start


class LinearAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.joined(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = F.elu(parts[0]) + 1, F.elu(parts[1]) + 1, parts[2]
        pairs = query @ key.transpose(-2, -1)
        mixed = pairs @ value / pairs.sum(-1, keepdim=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = LinearAttention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.mix(self.first(x))
        return x + self.feed(self.second(x))


class Picker(nn.Module):
    def __init__(self, width=64, heads=2):
        super().__init__()
        self.read = nn.Conv1d(1, width, 15, padding=7)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, traces):
        x = self.read(traces.transpose(1, 2)).transpose(1, 2)
        return self.head(self.blocks(x)).squeeze(-1)


def main(steps=30, batch=4):
    torch.manual_seed(62)
    traces, starts = seismograms(300)
    model = Picker()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        pick = torch.randint(len(traces), (batch,))
        loss = F.cross_entropy(model(traces[pick]), starts[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
