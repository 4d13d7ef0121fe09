"""Regression of a signal by a convolutional network, validated now and then."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 2,
    "truth": "Every fifth step validates on 24 batches in train mode and with gradients, longer than the five steps.",
    "cause": "evaluation",
    "also": ["periodic-pause"],
    "never": ["start-up", "data-loading", "duplicate-forward", "growth", "small-operators"],
    "healthy": False,
    "place": ["validation_loss(net, held_out)", "net(signal)", "F.smooth_l1_loss(net(signal)"],
    "share": 71,
    "remedy": "validate less often or on fewer batches, under torch.no_grad() and model.eval()",
    "without": [["if step % 5 == 4:", "if step < 0:"]],
}


def block(n_in, n_out, stride=1):
    return nn.Sequential(
        nn.Conv1d(n_in, n_out, 7, padding=3, stride=stride), nn.BatchNorm1d(n_out), nn.ReLU(), nn.Dropout(0.1)
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(block(4, 32), block(32, 48, 2), block(48, 64, 2))
        self.head = nn.Linear(64, 3)

    def forward(self, signal):
        return self.head(self.features(signal).mean(-1))


def make_batch(size, length=256):
    t = torch.linspace(0, 6.28, length)
    target = torch.rand(size, 3) + 0.5
    waves = torch.stack([torch.sin(t * f * 5) for f in target.flatten()]).view(size, 3, length)
    return torch.cat([waves, torch.randn(size, 1, length)], 1), target


def validation_loss(net, held_out):
    losses = []
    for signal, target in held_out:
        losses.append(F.smooth_l1_loss(net(signal), target).item())
    return sum(losses) / len(losses)


torch.manual_seed(0)
held_out = [make_batch(24) for _ in range(24)]
batches = [make_batch(24) for _ in range(10)]
net = Net()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
best = float("inf")
for step in range(40):
    signal, target = batches[step % len(batches)]
    loss = F.smooth_l1_loss(net(signal), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        current = validation_loss(net, held_out)
        if current < best:
            best = current
            print(f"{step + 1}: {best:.4f}")
