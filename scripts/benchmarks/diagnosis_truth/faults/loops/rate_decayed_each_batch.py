"""Forecast of electricity load: a dilated convolutional network over one week of hourly values."""

import math

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR

CASE = {
    "generation": 8,
    "truth": "The scheduler was meant to divide the rate by ten every five epochs but is stepped after every batch: after some thirty batches the rate is below 1e-8 and the optimizer no longer changes any parameter.",
    "cause": "no-update",
    "also": [],
    "never": ["data-loading", "logging", "growth", "small-operators", "host-python", "divergence", "nan-loss"],
    "healthy": False,
    "place": ["scheduler.step()", "StepLR("],
    "share": None,
    "remedy": "call scheduler.step() once per epoch, outside the loop over batches",
    "without": [
        ["            scheduler.step()\n", ""],
        ['        print(f"epoch {epoch + 1:2d}', '        scheduler.step()\n        print(f"epoch {epoch + 1:2d}'],
    ],
}


class Residual(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        value, gate = self.conv(x).chunk(2, dim=1)
        return x + self.out(torch.tanh(value) * torch.sigmoid(gate))


class Forecaster(nn.Module):
    def __init__(self, width=32, horizon=24):
        super().__init__()
        self.inp = nn.Conv1d(1, width, 1)
        self.body = nn.Sequential(*[Residual(width, 2**i) for i in range(6)])
        self.head = nn.Linear(width, horizon)

    def forward(self, x):
        return self.head(self.body(self.inp(x.unsqueeze(1)))[:, :, -24:].mean(2))


def load_curve(hours):
    t = torch.arange(hours, dtype=torch.float32)
    daily = torch.sin(2 * math.pi * t / 24) + 0.4 * torch.sin(4 * math.pi * t / 24 + 1.0)
    weekly = 0.5 * torch.cos(2 * math.pi * t / 168)
    drift = torch.cumsum(0.01 * torch.randn(hours), 0)
    return daily + weekly + drift + 0.1 * torch.randn(hours)


def windows(series, history=168, horizon=24):
    both = series.unfold(0, history + horizon, 3)
    return both[:, :history].contiguous(), both[:, history:].contiguous()


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = windows(load_curve(3000))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True
    )

    model = Forecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = StepLR(optimizer, step_size=5, gamma=0.1)

    for epoch in range(5):
        running = 0.0
        for history, future in loader:
            optimizer.zero_grad()
            loss = criterion(model(history), future)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += loss.item()
        print(f"epoch {epoch + 1:2d}: mse {running / len(loader):.4f}")
