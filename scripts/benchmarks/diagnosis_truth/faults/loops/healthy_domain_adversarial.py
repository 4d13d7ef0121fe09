"""Digits-like signs learnt on clean pictures and carried over to noisy ones, by a domain classifier that is reversed."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 9,
    "truth": "The domain loss wanders between 0.4 and 0.7 and does not come down to nothing, as its gradient is turned round on purpose: this is domain-adversarial training. Convolutions over both domains take nearly all of the time; the loss of the labels falls.",
    "cause": None,
    "also": [],
    "never": [
        "no-update", "divergence", "repeated-backward", "duplicate-forward", "unused-gradients", "logging",
        "growth", "host-python", "small-operators", "data-loading",
    ],
    "healthy": True,
}  # fmt: skip


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Adaptive(nn.Module):
    def __init__(self, classes, width=16, features=64):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * 36, features), nn.ReLU(),
        )  # fmt: skip
        self.label = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, classes))
        self.domain = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x, strength):
        f = self.features(x)
        return self.label(f), self.domain(Reverse.apply(f, strength)).squeeze(1)


def signs(count, classes=8, side=24):
    """A bar at one of eight angles, somewhere near the middle."""
    axis = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    label = torch.randint(classes, (count,))
    angle = (label.float() * math.pi / classes).view(-1, 1, 1) + 0.1 * torch.randn(count, 1, 1)
    oy, ox = 0.1 * torch.randn(2, count, 1, 1)
    across = (x - ox) * angle.sin() - (y - oy) * angle.cos()
    along = (x - ox) * angle.cos() + (y - oy) * angle.sin()
    return ((across.abs() < 0.1) & (along.abs() < 0.7)).float().unsqueeze(1), label


def field_pictures(count):
    picture, label = signs(count)
    ground = F.interpolate(torch.rand(count, 1, 4, 4), size=24, mode="bilinear")
    return 0.8 * picture + 0.4 * ground + 0.15 * torch.randn_like(picture), label


def main(steps=160, batch=24):
    torch.manual_seed(6)
    clean, label = signs(1200)
    field, field_label = field_pictures(1200)
    test, test_label = field_pictures(200)
    model = Adaptive(classes=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    is_clean = torch.cat([torch.ones(batch), torch.zeros(batch)])
    for step in range(steps):
        strength = 2 / (1 + math.exp(-10 * step / steps)) - 1
        source = torch.randint(len(clean), (batch,))
        target = torch.randint(len(field), (batch,))
        labels, domains = model(torch.cat([clean[source], field[target]]), 0.4 * strength)
        label_loss = F.cross_entropy(labels[:batch], label[source])
        domain_loss = F.binary_cross_entropy_with_logits(domains, is_clean)
        loss = label_loss + domain_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: label {label_loss.item():.3f}, domain {domain_loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        found = model(test, 0.0)[0].argmax(1)
    print(f"accuracy on field pictures: {(found == test_label).float().mean():.3f}")


if __name__ == "__main__":
    main()
