"""Load of a power grid, one day ahead: a dilated convolutional network."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

CASE = {
    "generation": 10,
    "truth": "The plateau scheduler has mode='max' but is given the validation error, which falls: it takes every better epoch for a plateau and cuts the learning rate to nothing. Measured: validation error 0.0857 at the end, 0.0415 without the fault.",
    "cause": "learning-rate-too-small",
    "also": [],
    "never": ["data-loading", "logging", "growth", "start-up", "padding", "host-python", "divergence", "nan-loss"],
    "healthy": False,
    "place": ["ReduceLROnPlateau(", "scheduler.step(", 'mode="max"'],
    "remedy": "mode='min'",
    "without": [
        [
            '    scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.2, patience=1)\n',
            '    scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.2, patience=1)\n',
        ]
    ],
}


class Dilated(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(width, 2 * width, 3, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        a, b = self.conv(F.pad(x, (self.pad, 0))).chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


class Forecaster(nn.Module):
    def __init__(self, inputs=3, width=32, horizon=24):
        super().__init__()
        self.first = nn.Conv1d(inputs, width, 1)
        self.blocks = nn.Sequential(*[Dilated(width, 2**i) for i in range(6)])
        self.head = nn.Linear(width, horizon)

    def forward(self, x):
        return self.head(self.blocks(self.first(x))[:, :, -1])


def load_curve(hours):
    t = torch.arange(hours, dtype=torch.float32)
    day, week = torch.sin(2 * math.pi * t / 24), torch.sin(2 * math.pi * t / 168)
    weather = torch.cumsum(0.1 * torch.randn(hours), 0)
    weather = weather - F.avg_pool1d(weather[None, None], 337, 1, 168, count_include_pad=False)[0, 0]
    load = day + 0.5 * week * day + 0.4 * weather + 0.15 * torch.randn(hours)
    return torch.stack([load, day, week])


def windows(series, starts, past=168, horizon=24):
    hours = starts[:, None] + torch.arange(past + horizon)
    cut = series[:, hours].transpose(0, 1)
    return cut[:, :, :past], cut[:, 0, past:]


@torch.no_grad()
def validate(model, series, starts):
    model.eval()
    x, y = windows(series, starts)
    error = F.mse_loss(model(x), y).item()
    model.train()
    return error


def main(epochs=24, steps=15, batch=16):
    torch.manual_seed(21)
    series = load_curve(6000)
    held_out = torch.arange(5000, 5800, 40)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.2, patience=1)
    for epoch in range(epochs):
        total = 0.0
        for _ in range(steps):
            x, y = windows(series, torch.randint(4800, (batch,)))
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        error = validate(model, series, held_out)
        scheduler.step(error)
        print(f"epoch {epoch:2d}: train {total / steps:.4f}  validation {error:.4f}")


if __name__ == "__main__":
    main()
