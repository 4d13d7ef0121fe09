"""Forecast of power use of many households: trend and season get layers of their own, mixed by a few blocks."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "The trend is the mean over windows that unfold makes, so each block reads and writes each value 25 times, forward and backward, instead of once in a pooling layer: 29% of the loop's time.",
    "cause": "elementwise-chain",
    "also": ["index-backward", "small-operators", "needless-copies", "layout-conversion"],
    "never": ["data-loading", "growth", "evaluation", "logging", "checkpoint-writing", "start-up", "host-python"],
    "healthy": False,
    "place": [
        "trend = padded.unfold(2, self.window, 1).mean(-1)",
        "trend = self.average(hidden)",
        "self.average = MovingAverage(window)",
    ],
    "share": 29,
    "remedy": "F.avg_pool1d(padded, self.window, 1), which keeps no windows",
    "without": [["padded.unfold(2, self.window, 1).mean(-1)", "F.avg_pool1d(padded, self.window, 1)"]],
}


def households(count, length):
    """Return use of power by hour: a day's rhythm, a week's rhythm and a slow drift."""
    hours = torch.arange(length)
    phase = torch.rand(count, 2, 1) * 6.28
    day = torch.sin(6.28 * hours / 24 + phase[:, 0]) * torch.rand(count, 1)
    week = torch.sin(6.28 * hours / 168 + phase[:, 1]) * torch.rand(count, 1)
    drift = torch.cumsum(torch.randn(count, length) * 0.03, 1)
    return day + week + drift + 0.1 * torch.randn(count, length)


class MovingAverage(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, series):
        padded = F.pad(series, (self.window // 2, self.window // 2), mode="replicate")
        trend = padded.unfold(2, self.window, 1).mean(-1)
        return trend


class Block(nn.Module):
    def __init__(self, width, window):
        super().__init__()
        self.average = MovingAverage(window)
        self.season = nn.Sequential(
            nn.Conv1d(width, 2 * width, 5, padding=2), nn.GELU(), nn.Conv1d(2 * width, width, 1)
        )
        self.slow = nn.Conv1d(width, width, 1)

    def forward(self, hidden):
        trend = self.average(hidden)
        return hidden + self.season(hidden - trend) + self.slow(trend)


class Forecaster(nn.Module):
    def __init__(self, seen, ahead, width=32, blocks=3, window=25):
        super().__init__()
        self.enter = nn.Conv1d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(width, window) for _ in range(blocks)])
        self.leave = nn.Conv1d(width, 1, 1)
        self.head = nn.Linear(seen, ahead)

    def forward(self, series):
        level = series.mean(1, keepdim=True)
        hidden = self.blocks(self.enter((series - level)[:, None]))
        return level + self.head(self.leave(hidden)[:, 0])


def main(steps=100, size=24, seen=192, ahead=48):
    torch.manual_seed(77)
    series = households(300, 1500)
    model = Forecaster(seen, ahead)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    offsets = torch.arange(seen + ahead)
    for step in range(1, steps + 1):
        rows = torch.randint(len(series), (size, 1))
        windows = series[rows, torch.randint(series.shape[1] - seen - ahead, (size, 1)) + offsets]
        loss = F.l1_loss(model(windows[:, :seen]), windows[:, seen:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            print(f"step {step}: mean error {loss.item():.3f}")


if __name__ == "__main__":
    main()
