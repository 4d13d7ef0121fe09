"""Quantiles of river levels for the next day, by dilated convolutions with normalised weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

CASE = {
    "generation": 17,
    "truth": "Weights are made from a direction and a length in each forward pass, as they change in each step; the rate falls when the error of a small held-out set stays; convolutions take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "evaluation",
        "learning-rate-too-small",
        "broadcast-loss",
        "host-python",
        "needless-copies",
        "data-loading",
        "growth",
        "small-operators",
    ],
    "healthy": True,
}

SEEN, AHEAD = 256, 24
QUANTILES = (0.1, 0.5, 0.9)


def rivers(count, length):
    """Return levels that rise with rain and fall slowly, and the rain."""
    rain = torch.relu(torch.randn(count, length) - 1.2)
    level, rows = torch.zeros(count), []
    for hour in range(length):
        level = 0.97 * level + rain[:, max(0, hour - 6)]
        rows.append(level)
    return torch.stack([torch.stack(rows, 1), rain], 1)


class Dilated(nn.Module):
    def __init__(self, inputs, outputs, step):
        super().__init__()
        self.before = 2 * step
        self.first = weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=step))
        self.second = weight_norm(nn.Conv1d(outputs, outputs, 3, dilation=step))
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x):
        y = F.relu(self.first(F.pad(x, (self.before, 0))), inplace=True)
        y = F.relu(self.second(F.pad(y, (self.before, 0))), inplace=True)
        return y + self.skip(x)


class Levels(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(*[Dilated(width if k else 2, width, 2**k) for k in range(4)])
        self.head = nn.Linear(width, AHEAD * len(QUANTILES))

    def forward(self, x):
        return self.head(self.body(x)[:, :, -1]).unflatten(1, (AHEAD, len(QUANTILES)))


def pinball(found, wanted):
    short = wanted[..., None] - found
    levels = torch.tensor(QUANTILES)
    return torch.maximum(levels * short, (levels - 1) * short).mean()


def cut(series, rows, starts):
    windows = series[rows[:, None, None], torch.arange(2)[:, None], starts[:, None, None] + torch.arange(SEEN + AHEAD)]
    return windows[:, :, :SEEN], windows[:, 0, SEEN:]


def main(steps=80, size=24):
    torch.manual_seed(174)
    series = rivers(120, 1200)
    held, starts = torch.arange(8), torch.full((8,), 900)
    model = Levels()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for step in range(1, steps + 1):
        x, wanted = cut(series, torch.randint(8, 120, (size,)), torch.randint(1200 - SEEN - AHEAD, (size,)))
        loss = pinball(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            with torch.no_grad():
                x, wanted = cut(series, held, starts)
                error = pinball(model(x), wanted).item()
            schedule.step(error)
            print(
                f"step {step}: loss {loss.item():.4f}, held out {error:.4f}, rate {optimizer.param_groups[0]['lr']:.4g}"
            )


if __name__ == "__main__":
    main()
