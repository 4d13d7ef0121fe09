"""A neural differential equation on images: the same block is evaluated by a Runge-Kutta solver."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "The solver calls the same convolutions sixteen times with other inputs; these convolutions take the time.",
    "cause": None,
    "also": [],
    "never": ["duplicate-forward", "small-operators", "host-python", "recomputation", "growth", "activations"],
    "healthy": True,
}


class Dynamics(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels + 1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels + 1, channels, 3, padding=1)
        self.evaluations = 0

    def forward(self, t, x):
        self.evaluations += 1
        time = torch.full_like(x[:, :1], t)
        x = self.conv1(torch.cat([F.relu(self.norm1(x)), time], 1))
        return self.conv2(torch.cat([F.relu(self.norm2(x)), time], 1))


def rk4(f, x, t0=0.0, t1=1.0, steps=4):
    h, t = (t1 - t0) / steps, t0
    for _ in range(steps):
        k1 = f(t, x)
        k2 = f(t + h / 2, x + h / 2 * k1)
        k3 = f(t + h / 2, x + h / 2 * k2)
        k4 = f(t + h, x + h * k3)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        t += h
    return x


class ODENet(nn.Module):
    def __init__(self, channels=32, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 4, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 4, 2, 1))
        self.dynamics = Dynamics(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(rk4(self.dynamics, self.stem(x)).mean(dim=(2, 3)))


class Average:
    def __init__(self, momentum=0.9):
        self.momentum, self.value = momentum, None

    def update(self, value):
        self.value = value if self.value is None else self.momentum * self.value + (1 - self.momentum) * value


if __name__ == "__main__":
    torch.manual_seed(0)
    model, loss_meter, nfe = ODENet(), Average(), Average()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 26)
    for iteration in range(26):
        y = torch.randint(0, 10, (24,))
        x = torch.randn(24, 1, 28, 28) + y.view(-1, 1, 1, 1) / 5
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        nfe.update(model.dynamics.evaluations)
        model.dynamics.evaluations = 0
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss_meter.update(loss.item())
        if iteration % 10 == 9:
            print(f"iteration {iteration} | loss {loss_meter.value:.3f} | NFE {nfe.value:.1f}")
