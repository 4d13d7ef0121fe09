"""A head for four kinds of flowers on top of a convolutional net that stays as it is; pictures are flipped and cropped."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "Most weights never change, but on purpose: a body that was trained before gives features, in evaluation mode and without gradients, and only the head learns. The features cannot be kept, as each step crops anew.",
    "cause": None,
    "also": [],
    "never": ["no-update", "duplicate-forward", "unused-gradients", "data-loading", "growth", "logging", "wrong-mode"],
    "healthy": True,
}


class Body(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        layers, inputs = [], 3
        for i in range(4):
            outputs = width * 2 ** min(i, 2)
            layers += [nn.Conv2d(inputs, outputs, 3, 1 if i == 0 else 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        self.net = nn.Sequential(*layers)
        self.outputs = inputs

    def forward(self, x):
        return self.net(x).mean((2, 3))


def flowers(count, petals, side=36):
    """Petals around a centre: their number is the kind."""
    kind = torch.randint(len(petals), (count,))
    axis = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle, radius = torch.atan2(y, x), (x**2 + y**2).sqrt()
    turned = torch.tensor(petals)[kind][:, None, None] * (angle + 6.28 * torch.rand(count, 1, 1))
    shape = torch.sigmoid(12 * (0.5 + 0.3 * torch.cos(turned) - radius))
    picture = shape[:, None] * torch.rand(count, 3, 1, 1) + 0.2 * torch.randn(count, 3, side, side)
    return picture, kind


def augment(x, crop=32):
    top, left = torch.randint(x.shape[2] - crop + 1, (2,)).tolist()
    x = x[:, :, top : top + crop, left : left + crop]
    return x.flip(3) if torch.rand(()) < 0.5 else x


def pretrain(body, steps=100, batch=24):
    """The body learns on other flowers than those that the head is for."""
    model = nn.Sequential(body, nn.Linear(body.outputs, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pictures, kinds = flowers(1500, (2, 4, 6, 8, 11))
    for _ in range(steps):
        pick = torch.randint(len(pictures), (batch,))
        loss = F.cross_entropy(model(augment(pictures[pick])), kinds[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return body


def probe(body, steps=160, batch=48):
    body.eval().requires_grad_(False)
    head = nn.Sequential(nn.BatchNorm1d(body.outputs), nn.Linear(body.outputs, 4))
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    pictures, kinds = flowers(2000, (1, 3, 5, 9))
    for step in range(1, steps + 1):
        pick = torch.randint(len(pictures), (batch,))
        with torch.no_grad():
            features = body(augment(pictures[pick]))
        logits = head(features)
        loss = F.cross_entropy(logits, kinds[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            right = (logits.argmax(1) == kinds[pick]).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, {right:.1%} right")


if __name__ == "__main__":
    torch.manual_seed(14)
    probe(pretrain(Body()))
