"""Cells in microscope pictures: a detector with anchors on a grid."""

import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "The targets of the detector are made in Python loops over pictures, cells and anchors, with one overlap computed at a time: 44% of the loop's time.",
    "cause": "host-python",
    "also": ["small-operators", "data-loading"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "unused-gradients"],
    "healthy": False,
    "place": [
        "for anchor, size in enumerate(ANCHORS):",
        "for cell in cells:",
        "overlap = iou(cell[2], cell[3], size, size)",
        "common = min(w1, w2) * min(h1, h2)",
        "return common / (w1 * h1 + w2 * h2 - common)",
        "targets[number, best, row, column, 1:] = torch.tensor(",
        "targets[number, best, row, column, 0] = 1",
        "wanted = assign(labels)",
    ],
    "share": 44,
    "remedy": "assign all cells of a batch at once with tensors, or make the targets of each picture once",
    "without": [
        [
            "        pick = random.sample(range(len(pictures)), batch)\n",
            "        pick = random.sample(range(len(pictures)), batch)\n        known = globals().setdefault('known', {})\n        for one in pick:\n            if one not in known:\n                known[one] = assign([cells[one]])\n",
        ],
        ["wanted = assign(labels)", "wanted = torch.cat([known[one] for one in pick])"],
    ],
}

SIDE, GRID = 64, 16
ANCHORS = (3.0, 4.5, 6.0, 8.0, 11.0, 15.0)


def plates(count):
    """Return pictures of bright discs, and the centre and size of each disc."""
    place = torch.arange(SIDE).float()
    pictures, cells = torch.zeros(count, 1, SIDE, SIDE), []
    for number in range(count):
        found = []
        for _ in range(random.randint(25, 45)):
            x, y = random.uniform(2, SIDE - 2), random.uniform(2, SIDE - 2)
            width, height = random.uniform(3, 12), random.uniform(3, 12)
            inside = ((place[None] - x) / width) ** 2 + ((place[:, None] - y) / height) ** 2 < 0.25
            pictures[number, 0] += inside.float() * random.uniform(0.5, 1)
            found.append((x, y, width, height))
        cells.append(found)
    return pictures + 0.1 * torch.randn_like(pictures), cells


def iou(w1, h1, w2, h2):
    common = min(w1, w2) * min(h1, h2)
    return common / (w1 * h1 + w2 * h2 - common)


def assign(labels):
    """Return for each anchor of each place whether it has a cell, and how the cell differs from it."""
    targets = torch.zeros(len(labels), len(ANCHORS), GRID, GRID, 5)
    step = SIDE / GRID
    for number, cells in enumerate(labels):
        for cell in cells:
            best, most = 0, 0.0
            for anchor, size in enumerate(ANCHORS):
                overlap = iou(cell[2], cell[3], size, size)
                if overlap > most:
                    best, most = anchor, overlap
            column, row = int(cell[0] / step), int(cell[1] / step)
            targets[number, best, row, column, 0] = 1
            targets[number, best, row, column, 1:] = torch.tensor(
                [cell[0] / step - column, cell[1] / step - row, cell[2] / ANCHORS[best], cell[3] / ANCHORS[best]]
            )
    return targets


class Detector(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 5 * len(ANCHORS), 1),
        )  # fmt: skip

    def forward(self, pictures):
        return self.body(pictures).unflatten(1, (len(ANCHORS), 5)).permute(0, 1, 3, 4, 2)


def main(steps=80, batch=16):
    torch.manual_seed(64)
    random.seed(64)
    pictures, cells = plates(120)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(steps):
        pick = random.sample(range(len(pictures)), batch)
        labels = [cells[one] for one in pick]
        wanted = assign(labels)
        found = model(pictures[pick])
        there = wanted[..., :1]
        loss = F.binary_cross_entropy_with_logits(found[..., :1], there, pos_weight=torch.tensor(20.0))
        loss = loss + ((found[..., 1:] - wanted[..., 1:]).square() * there).sum() / there.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
