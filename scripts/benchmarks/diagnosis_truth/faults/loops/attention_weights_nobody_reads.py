"""Load of the next day from a week of sensor readings, with a small encoder around nn.MultiheadAttention."""

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "nn.MultiheadAttention returns the averaged attention weights by default. The block throws them away, but for them all scores are written to memory, and attention cannot run fused.",
    "cause": "unfused-attention",
    "also": ["elementwise-chain"],
    "never": ["data-loading", "host-python", "growth", "start-up", "no-update", "logging", "evaluation"],
    "healthy": False,
    "place": [
        "mixed, _ = self.attention(h, h, h)",
        "self.attention = nn.MultiheadAttention(width, heads, batch_first=True)",
        "x = block(x)",
    ],
    "share": 36,
    "remedy": "pass need_weights=False",
    "without": [["self.attention(h, h, h)", "self.attention(h, h, h, need_weights=False)"]],
}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.first(x)
        mixed, _ = self.attention(h, h, h)
        x = x + mixed
        return x + self.wide(self.second(x))


class Forecaster(nn.Module):
    def __init__(self, sensors, length, horizon, width=64, heads=8, depth=2):
        super().__init__()
        self.lift = nn.Linear(sensors, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.out = nn.Linear(width, horizon)

    def forward(self, series):
        x = self.lift(series) + self.place
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))


def load_curves(days=400, sensors=7):
    hours = torch.arange(days * 24.0)
    daily = torch.sin(hours[:, None] * 6.2832 / 24 + torch.rand(sensors) * 6)
    weekly = torch.cos(hours[:, None] * 6.2832 / 168 + torch.rand(sensors) * 6)
    return daily + 0.5 * weekly + 0.1 * torch.randn(len(hours), sensors)


if __name__ == "__main__":
    torch.manual_seed(21)
    length, horizon, batch = 192, 24, 8
    curves = load_curves()
    net = Forecaster(curves.shape[1], length, horizon)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    window = torch.arange(length + horizon)
    for it in range(60):
        start = torch.randint(len(curves) - len(window), (batch, 1))
        part = curves[start + window]
        loss = nn.functional.mse_loss(net(part[:, :length]), part[:, length:, 0])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 20 == 19:
            print(f"iteration {it + 1}: {loss.item():.4f}")
