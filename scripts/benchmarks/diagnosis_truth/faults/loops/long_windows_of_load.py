"""Forecast of electricity load from long windows, with feature-map attention instead of softmax."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "Linear attention multiplies in the wrong order: (q k^T) v makes a 640 x 640 matrix for each head, where q (k^T v) needs one of 12 x 12 only, so the time grows with the square of the window.",
    "cause": "unfused-attention",
    "also": ["score-matrices", "elementwise-chain", "slow-products"],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "host-python",
        "small-operators",
        "no-update",
        "start-up",
    ],
    "healthy": False,
    "place": [
        "weights = q @ k.transpose(-2, -1)",
        "mixed = weights @ v",
        "total = weights.sum(-1, keepdim=True)",
        "mixed / total",
    ],
    "share": 66,
    "remedy": "q @ (k.transpose(-2, -1) @ v), and q @ k.sum(-2) for the normalisation",
    "without": [
        [
            """        weights = q @ k.transpose(-2, -1)
        total = weights.sum(-1, keepdim=True)
        mixed = weights @ v
""",
            """        total = q @ k.sum(-2).unsqueeze(-1)
        mixed = q @ (k.transpose(-2, -1) @ v)
""",
        ]
    ],
}


def load_curves(count, length):
    """Daily and weekly rhythm, weather that drifts, and noise; hourly values of several grids."""
    hour = torch.arange(length) + torch.randint(168, (count, 1))
    daily = torch.sin(hour * 2 * torch.pi / 24 + 0.3 * torch.randn(count, 1))
    weekly = 0.6 * torch.sin(hour * 2 * torch.pi / 168)
    weather = 0.05 * torch.randn(count, length).cumsum(1)
    return torch.stack([daily + weekly + weather + 0.1 * torch.randn(count, length), weather], -1)


class KernelAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        weights = q @ k.transpose(-2, -1)
        total = weights.sum(-1, keepdim=True)
        mixed = weights @ v
        return self.out((mixed / total).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.attention = KernelAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Forecaster(nn.Module):
    def __init__(self, window=640, horizon=24, dim=48, heads=4, depth=2):
        super().__init__()
        self.enter = nn.Linear(2, dim)
        self.place = nn.Parameter(0.02 * torch.randn(window, dim))
        self.layers = nn.Sequential(*[Layer(dim, heads) for _ in range(depth)])
        self.head = nn.Linear(2 * dim, horizon)

    def forward(self, x):
        h = self.layers(self.enter(x) + self.place)
        return self.head(torch.cat([h[:, -1], h.mean(1)], 1))


class Training:
    def __init__(self, window=640, horizon=24):
        self.window, self.horizon = window, horizon
        self.curves = load_curves(20, 4000)
        self.model = Forecaster(window, horizon)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batches(self, count, size=1):
        for _ in range(count):
            grid = torch.randint(len(self.curves), (size,)).tolist()
            start = torch.randint(4000 - self.window - self.horizon, (size,)).tolist()
            parts = torch.stack([self.curves[g, s : s + self.window + self.horizon] for g, s in zip(grid, start)])
            yield parts[:, : self.window], parts[:, self.window :, 0]

    def fit(self, steps):
        for number, (past, future) in enumerate(self.batches(steps), 1):
            loss = F.l1_loss(self.model(past), future)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if number % 25 == 0:
                print(f"step {number}: mean absolute error {loss.item():.3f}")


if __name__ == "__main__":
    torch.manual_seed(4)
    Training().fit(100)
