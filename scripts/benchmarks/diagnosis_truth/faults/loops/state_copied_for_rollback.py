"""Load forecasting by residual stacks, with a step that is undone when its loss is not finite."""

import contextlib
import copy
import math

import torch
from torch import nn

CASE = {
    "generation": 5,
    "truth": "Before each step the weights and the optimizer's state are copied by deepcopy, for a rollback that never happens.",
    "cause": "host-python",
    "also": ["checkpoint-writing", "model-copies", "needless-copies"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": ["copy.deepcopy(", "with self.rollback()"],
    "share": 41,
    "remedy": "check the loss before the update, or copy the state once in a hundred steps",
    "without": [
        [
            "        saved = copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))\n",
            "        saved = (self.net.state_dict(), self.optimizer.state_dict())\n",
        ]
    ],
}


class Stack(nn.Module):
    """Explains a part of the window, and forecasts from it."""

    def __init__(self, window, horizon, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(window, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.theta = nn.Linear(width, window + horizon)
        self.sizes = (window, horizon)

    def forward(self, rest):
        back, ahead = self.theta(self.body(rest)).split(self.sizes, dim=-1)
        return rest - back, ahead


class Beats(nn.Module):
    def __init__(self, window=168, horizon=24, width=384, stacks=4):
        super().__init__()
        self.stacks = nn.ModuleList(Stack(window, horizon, width) for _ in range(stacks))

    def forward(self, window):
        rest, forecast = window, 0
        for stack in self.stacks:
            rest, ahead = stack(rest)
            forecast = forecast + ahead
        return forecast


def smape(forecast, truth):
    return (2 * (forecast - truth).abs() / (forecast.abs() + truth.abs() + 1e-3)).mean()


class SafeTrainer:
    def __init__(self, net, lr):
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
        self.undone = 0

    @contextlib.contextmanager
    def rollback(self):
        """Undo what the block did to the weights if it raises FloatingPointError."""
        saved = copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))
        try:
            yield
        except FloatingPointError as error:
            self.net.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
            self.undone += 1
            print(f"undone: {error}")

    def step(self, window, truth):
        loss = smape(self.net(window), truth)
        with self.rollback():
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss is {loss.item()}")
        return loss.detach()


def windows(series, count, length):
    """Random windows of random meters, for ever."""
    while True:
        meter = torch.randint(len(series), (count, 1))
        start = torch.randint(series.shape[1] - length, (count, 1))
        yield series[meter, start + torch.arange(length)]


def synthetic_load(meters=64, hours=24 * 120):
    t = torch.arange(hours) / 24
    phase = torch.rand(meters, 1)
    daily = torch.sin(2 * math.pi * (t + phase)) + 0.4 * torch.sin(4 * math.pi * (t + 2 * phase))
    return 2.5 + daily + 0.5 * torch.sin(2 * math.pi * t / 7) + 0.1 * torch.randn(meters, hours)


torch.manual_seed(1)
trainer, losses = SafeTrainer(Beats(), lr=4e-4), []
stream = windows(synthetic_load(), 128, 168 + 24)
while len(losses) < 250:
    batch = next(stream)
    losses.append(trainer.step(batch[:, :168], batch[:, 168:]))
    if len(losses) % 50 == 0:
        print(f"{len(losses)}: sMAPE {torch.stack(losses[-50:]).mean():.4f}")
print(f"{trainer.undone} steps undone")
