"""Click prediction on a stream of ad impressions: features of old campaigns disappear, new ones come every day."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 8,
    "truth": "Momentum of the weights of campaigns that have ended decays into denormal numbers, on which the CPU is many times slower, so optimizer.step becomes slower and slower in the course of the run.",
    "cause": "growth",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "small-operators",
        "host-python",
        "no-update",
        "nan-loss",
        "periodic-pause",
    ],
    "healthy": False,
    "place": ["optimizer.step()"],
    "share": 26,
    "remedy": "torch.set_flush_denormal(True) at the start",
    "without": [["    torch.manual_seed(21)\n", "    torch.manual_seed(21)\n    torch.set_flush_denormal(True)\n"]],
}

DAYS, STEPS_PER_DAY, CAMPAIGNS, LIVE = 32, 40, 4096, 300


class Clicks(nn.Module):
    def __init__(self, features, width=128):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.rest(self.first(x)).squeeze(1)


def impressions(day, batch, appeal):
    """Multi-hot campaigns seen by a user on that day; each campaign lives for some days."""
    newest = int(CAMPAIGNS * (day + 1) / DAYS)
    oldest = max(0, newest - LIVE)
    shown = torch.randint(oldest, newest, (batch, 12))
    x = torch.zeros(batch, CAMPAIGNS).scatter_(1, shown, 1.0)
    clicked = (appeal[shown].mean(1) + 0.3 * torch.randn(batch) > 0).float()
    return x, clicked


def main(batch=64):
    torch.manual_seed(21)
    appeal = torch.randn(CAMPAIGNS)
    model = Clicks(CAMPAIGNS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    for day in range(DAYS):
        total = torch.zeros(())
        for _ in range(STEPS_PER_DAY):
            x, clicked = impressions(day, batch, appeal)
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x), clicked)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"day {day:2d}: log loss {total.item() / STEPS_PER_DAY:.4f}")


if __name__ == "__main__":
    main()
