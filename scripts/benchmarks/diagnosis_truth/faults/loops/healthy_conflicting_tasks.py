"""One trunk for two tasks on road scenes, depth and steering; conflicting gradients of the trunk are projected."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "Each task's gradient of the trunk is wanted on its own, to project one onto the normal plane of the other, so two backward passes through one graph are the method itself; convolutions take the time.",
    "cause": None,
    "also": [],
    "never": [
        "repeated-backward",
        "unused-gradients",
        "gradients-not-cleared",
        "growth",
        "no-update",
        "data-loading",
        "duplicate-forward",
    ],
    "healthy": True,
}


def scenes(count, height=32, width=48):
    """A road bends through the picture; what is near looks bright."""
    bend = torch.randn(count, 1, 1)
    y = torch.linspace(0, 1, height).view(1, -1, 1)
    x = torch.linspace(-1, 1, width).view(1, 1, -1)
    road = (x - bend * (1 - y) ** 2).abs() < 0.1 + 0.6 * y
    depth = (1.2 - y).expand(count, height, width) + 0.4 * (~road)
    picture = torch.stack([1 / (0.5 + depth), road.float(), (1 - y).expand_as(depth)], 1)
    return picture + 0.1 * torch.randn_like(picture), depth.unsqueeze(1), 0.5 * bend.flatten()


class Trunk(nn.Sequential):
    def __init__(self, width=32):
        super().__init__(
            nn.Conv2d(3, width, 5, 2, 2), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )  # fmt: skip


class Driver(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = Trunk(width)
        self.depth = nn.Sequential(nn.Conv2d(2 * width, 16, 3, 1, 1), nn.PixelShuffle(4))
        self.steer = nn.Sequential(nn.AdaptiveAvgPool2d((2, 4)), nn.Flatten(), nn.Linear(16 * width, 1))

    def forward(self, x):
        shared = self.trunk(x)
        return self.depth(shared), self.steer(shared).squeeze(1)


def projected(first, second):
    """Takes from each gradient what points against the other, and adds the two."""
    dot = sum((a * b).sum() for a, b in zip(first, second))
    if dot >= 0:
        return [a + b for a, b in zip(first, second)]
    length1 = sum(a.square().sum() for a in first)
    length2 = sum(b.square().sum() for b in second)
    return [a - dot / length2 * b + b - dot / length1 * a for a, b in zip(first, second)]


def step(model, optimizer, picture, depth, angle):
    depth_guess, angle_guess = model(picture)
    losses = F.l1_loss(depth_guess, depth), F.mse_loss(angle_guess, angle)
    shared = list(model.trunk.parameters())
    optimizer.zero_grad()
    losses[0].backward(retain_graph=True)
    first = [p.grad for p in shared]
    for p in shared:
        p.grad = None
    losses[1].backward()
    second = [p.grad for p in shared]
    for p, gradient in zip(shared, projected(first, second)):
        p.grad = gradient
    optimizer.step()
    return [loss.item() for loss in losses]


def main(steps=100, batch=12):
    torch.manual_seed(40)
    picture, depth, angle = scenes(600)
    model = Driver()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for number in range(1, steps + 1):
        pick = torch.randint(len(angle), (batch,))
        losses = step(model, optimizer, picture[pick], depth[pick], angle[pick])
        if number % 20 == 0:
            print("step {}: depth {:.3f}, steering {:.4f}".format(number, *losses))


if __name__ == "__main__":
    main()
