"""Forecast of a town's demand for power from the last four days, by an LSTM."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "A Python loop calls an LSTM cell for each of the 96 hours, so that each step runs thousands of small operators forward and backward: 72% of the loop's time.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": ["data-loading", "growth", "evaluation", "logging", "start-up", "padding", "duplicate-forward"],
    "healthy": False,
    "place": [
        "hidden, memory = self.cell(x[:, hour], (hidden, memory))",
        "for hour in range(x.shape[1]):",
        "outputs.append(hidden)",
        "outputs = self.encoder(past)",
    ],
    "share": 72,
    "remedy": "use nn.LSTM, which takes the whole sequence in one call",
    "without": [
        ["self.encoder = Recurrent(features, hidden)", "self.encoder = nn.LSTM(features, hidden, batch_first=True)"],
        ["outputs = self.encoder(past)", "outputs = self.encoder(past)[0]"],
    ],
}


def demand(towns=24, hours=2400):
    """Return demand, temperature and the hour's sine and cosine for each town and hour."""
    time = torch.arange(hours).float()
    angle = 2 * torch.pi * time / 24
    weather = torch.cumsum(0.1 * torch.randn(towns, hours), 1)
    weather = weather - weather.mean(1, keepdim=True)
    load = 1 + 0.4 * torch.sin(angle - 1) + 0.2 * torch.sin(2 * angle) - 0.1 * weather
    load = load + 0.05 * torch.randn(towns, hours)
    return torch.stack([load, weather, torch.sin(angle).expand(towns, -1), torch.cos(angle).expand(towns, -1)], -1)


class Windows:
    def __init__(self, series, past=96, ahead=12):
        self.series, self.past, self.ahead = series, past, ahead

    def sample(self, size):
        towns, hours, _ = self.series.shape
        town = torch.randint(towns, (size, 1))
        start = torch.randint(hours - self.past - self.ahead, (size, 1))
        window = self.series[town, start + torch.arange(self.past + self.ahead)]
        return window[:, : self.past], window[:, self.past :, 0]


class Recurrent(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(features, hidden)

    def forward(self, x):
        hidden = memory = x.new_zeros(len(x), self.hidden)
        outputs = []
        for hour in range(x.shape[1]):
            hidden, memory = self.cell(x[:, hour], (hidden, memory))
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class Forecaster(nn.Module):
    def __init__(self, features=4, hidden=40, ahead=12):
        super().__init__()
        self.encoder = Recurrent(features, hidden)
        self.score = nn.Linear(hidden, 1)
        self.head = nn.Linear(2 * hidden, ahead)

    def forward(self, past):
        outputs = self.encoder(past)
        weights = self.score(outputs).softmax(1)
        return self.head(torch.cat([outputs[:, -1], (weights * outputs).sum(1)], -1))


def main(steps=160, size=32):
    torch.manual_seed(12)
    windows = Windows(demand())
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        past, future = windows.sample(size)
        loss = F.l1_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 40 == 0:
            print(f"step {step}: absolute error {loss.item():.4f}")


if __name__ == "__main__":
    main()
