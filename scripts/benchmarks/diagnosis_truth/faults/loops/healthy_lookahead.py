"""Classifies sensor windows with Lookahead around Adam: every fifth step goes halfway back to slow weights."""

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Every fifth step overwrites the weights by the mean of them and of slow weights from five steps before: that is Lookahead, and the network learns. Convolutions take the time.",
    "cause": None,
    "also": [],
    "never": [
        "undone-update",
        "no-update",
        "lost-state",
        "model-copies",
        "needless-copies",
        "periodic-pause",
        "host-python",
    ],
    "healthy": True,
}


class Lookahead:
    def __init__(self, inner, period=5, alpha=0.5):
        self.inner, self.period, self.alpha, self.count = inner, period, alpha, 0
        self.fast = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.fast]

    def zero_grad(self):
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.period == 0:
            torch._foreach_lerp_(self.slow, self.fast, self.alpha)
            torch._foreach_copy_(self.fast, self.slow)


class WindowNet(nn.Sequential):
    def __init__(self, channels, classes):
        def stage(a, b):
            return nn.Sequential(nn.Conv1d(a, b, 5, stride=2, padding=2), nn.BatchNorm1d(b), nn.ReLU())

        super().__init__(
            stage(channels, 64),
            stage(64, 96),
            stage(96, 128),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(128, classes),
        )


def windows(count, channels, classes):
    label = torch.randint(classes, (count,))
    time = torch.arange(256.0)
    wave = torch.sin(time * (0.05 + 0.03 * label.view(-1, 1, 1)) + 6.28 * torch.rand(count, channels, 1))
    return wave + 0.8 * torch.randn(count, channels, 256), label


def main(steps=80, batch=64):
    torch.manual_seed(6)
    net = WindowNet(9, 6)
    optimizer = Lookahead(torch.optim.Adam(net.parameters(), lr=2e-3, fused=True))
    x, label = windows(1280, 9, 6)
    order = torch.cat([torch.randperm(len(x)) for _ in range(steps * batch // len(x))]).split(batch)
    for step, rows in enumerate(order, 1):
        loss = nn.functional.cross_entropy(net(x[rows]), label[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"{step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
