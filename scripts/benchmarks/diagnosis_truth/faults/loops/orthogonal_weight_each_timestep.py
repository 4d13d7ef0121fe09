"""Forecast of the load of a power grid with a recurrent net of orthogonal transition, so that memory lasts."""

import math

import torch
from torch import nn
from torch.nn.utils import parametrizations

CASE = {
    "generation": 9,
    "truth": "The orthogonal weight is a parametrization: each of the time steps reads it and so computes the matrix exponential (and its gradient) anew.",
    "cause": "decompositions",
    "also": ["small-operators", "duplicate-forward"],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "start-up",
        "padding",
        "no-update",
        "dense-gradient",
        "host-python",
    ],
    "healthy": False,
    "place": ["self.transition(state)", "parametrizations.orthogonal(", "prediction = model(history)"],
    "share": 58,
    "remedy": "run the model inside parametrize.cached(), or read the weight once before the loop over time",
    "without": [
        [
            "        prediction = model(history)\n",
            "        with nn.utils.parametrize.cached():\n            prediction = model(history)\n",
        ],
    ],
}


class OrthogonalRNN(nn.Module):
    def __init__(self, features, hidden, horizon):
        super().__init__()
        self.hidden = hidden
        self.enter = nn.Linear(features, hidden)
        self.transition = parametrizations.orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.threshold = nn.Parameter(torch.zeros(hidden))
        self.leave = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, horizon))

    def forward(self, series):
        state = series.new_zeros(series.shape[0], self.hidden)
        for drive in self.enter(series).unbind(1):
            raw = self.transition(state) + drive
            state = torch.sign(raw) * torch.relu(raw.abs() + self.threshold)
        return self.leave(state)


class Grid:
    """Load with a daily and a weekly rhythm, the weather, and noise; one value an hour."""

    def __init__(self, days=400):
        hour = torch.arange(24.0 * days)
        daily, weekly = torch.sin(2 * math.pi * hour / 24), torch.sin(2 * math.pi * hour / 168)
        weather = torch.cumsum(torch.randn(len(hour)), 0)
        weather = (weather - weather.mean()) / weather.std()
        load = daily * (1 + 0.3 * weekly) + 0.5 * weather + 0.1 * torch.randn(len(hour))
        self.table = torch.stack([load, weather, daily, weekly], 1)

    def draw(self, batch, past, horizon):
        start = torch.randint(len(self.table) - past - horizon, (batch, 1))
        rows = start + torch.arange(past + horizon)
        window = self.table[rows]
        return window[:, :past], window[:, past:, 0]


def fit(steps=120, batch=512, past=12, horizon=6):
    torch.manual_seed(1)
    grid = Grid()
    model = OrthogonalRNN(4, 48, horizon)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    criterion = nn.SmoothL1Loss()
    for step in range(1, steps + 1):
        history, future = grid.draw(batch, past, horizon)
        prediction = model(history)
        loss = criterion(prediction, future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"{step:4d}  {loss.item():.4f}")


if __name__ == "__main__":
    fit()
