"""Ground cover from satellite bands: one training with warm restarts, and a vote of the nets at the ends of cycles."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

CASE = {
    "generation": 9,
    "truth": "The learning rate jumps up at each restart and the loss with it, and at the end of each of five cycles the weights are copied, as a snapshot ensemble wants; five small copies in 200 steps. Matrix products take the time.",
    "cause": None,
    "also": ["unfused-optimizer"],
    "never": [
        "divergence", "growth", "periodic-pause", "checkpoint-writing", "model-copies", "evaluation", "lost-state",
        "no-update", "host-python", "small-operators", "data-loading", "logging",
    ],
    "healthy": True,
}  # fmt: skip


class CoverNet(nn.Module):
    def __init__(self, bands, classes, width=384):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(bands, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, classes),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


class Scene:
    """Pixels of twelve bands over four dates; each kind of cover has two ways to look."""

    def __init__(self, classes=10, bands=48):
        self.classes, self.bands = classes, bands
        self.centres = 0.6 * torch.randn(2, classes, bands)
        self.mix = torch.randn(bands, bands) / bands**0.5

    def pixels(self, count):
        cover = torch.randint(self.classes, (count,))
        look = torch.randint(2, (count,))
        x = self.centres[look, cover] + torch.randn(count, self.bands) @ self.mix
        return x + 0.2 * x.roll(1, 1) * x, cover


def vote(members, x):
    with torch.no_grad():
        return torch.stack([F.softmax(member(x), 1) for member in members]).mean(0).argmax(1)


def main(cycles=5, length=40, batch=256):
    torch.manual_seed(14)
    scene = Scene()
    pixels, cover = scene.pixels(8000)
    test_pixels, test_cover = scene.pixels(1000)
    model = CoverNet(scene.bands, scene.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=length)
    members = []
    for cycle in range(cycles):
        model.train()
        for _ in range(length):
            pick = torch.randint(len(pixels), (batch,))
            loss = F.cross_entropy(model(pixels[pick]), cover[pick], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        members.append(copy.deepcopy(model).eval())
        print(f"cycle {cycle}: loss {loss.item():.3f}")
    for n in (1, cycles):
        right = (vote(members[-n:], test_pixels) == test_cover).float().mean()
        print(f"accuracy of {n} nets: {right:.3f}")


if __name__ == "__main__":
    main()
