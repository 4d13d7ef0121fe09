"""Garments from pictures without a backward pass through the whole network: each layer learns from a loss of its own."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Each of the four layers has a loss, a backward pass and an optimizer of its own, and passes its output on without a graph on purpose; convolutions take the time.",
    "cause": None,
    "also": [],
    "never": [
        "repeated-backward",
        "cut-gradients",
        "unused-gradients",
        "gradients-not-cleared",
        "no-update",
        "duplicate-forward",
        "needless-copies",
        "small-operators",
        "unfused-optimizer",
        "growth",
    ],
    "healthy": True,
}

KINDS, SIDE = 8, 28


def garments(count):
    """Return pictures whose pattern of stripes and width tell the kind."""
    kinds = torch.randint(KINDS, (count,))
    place = torch.arange(SIDE).float()
    stripes = torch.sin(place[None, :, None] * (0.3 + 0.15 * (kinds % 4)[:, None, None]) + torch.rand(count, 1, 1) * 6)
    inside = (place[None, None] - SIDE / 2).abs() < (6 + 5 * (kinds // 4)[:, None, None])
    return (stripes * inside + 0.4 * torch.randn(count, SIDE, SIDE))[:, None], kinds


class LocalLayer(nn.Module):
    """Layer with a small classifier, which is the only source of its gradients."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.body = nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())
        self.judge = nn.Linear(outputs, KINDS)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def scores(self, hidden):
        return self.judge(hidden.mean((2, 3)))

    def learn(self, x, kinds):
        hidden = self.body(x)
        loss = F.cross_entropy(self.scores(hidden), kinds)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return hidden.detach(), loss.detach()


def main(steps=80, batch=48):
    torch.manual_seed(73)
    pictures, kinds = garments(1500)
    widths = (1, 24, 32, 32, 48)
    layers = [LocalLayer(a, b, 1 + n % 2) for n, (a, b) in enumerate(zip(widths, widths[1:], strict=False))]
    for step in range(1, steps + 1):
        pick = torch.randint(len(pictures), (batch,))
        hidden, losses = pictures[pick], []
        for layer in layers:
            hidden, loss = layer.learn(hidden, kinds[pick])
            losses.append(loss)
        if step % 20 == 0:
            print(f"step {step}: " + ", ".join(f"{loss:.3f}" for loss in torch.stack(losses).tolist()))


if __name__ == "__main__":
    main()
