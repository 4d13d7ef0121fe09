"""One network for the defects of many machines: each batch of vibrations comes from one machine."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "The branches of all ten machines run for every batch, which belongs to one of them, so that nine of ten outputs are never read: 55% of the loop's time.",
    "cause": "unused-outputs",
    "also": [],
    "never": ["data-loading", "growth", "evaluation", "logging", "checkpoint-writing", "start-up", "cut-gradients"],
    "healthy": False,
    "place": [
        "return {name: branch(shared) for name, branch in self.branches.items()}",
        "scores = model(waves)[name]",
    ],
    "share": 55,
    "remedy": "give the model the name of the task, and run only the branch of it",
    "without": [
        ["def forward(self, waves):\n        shared", "def forward(self, waves, name):\n        shared"],
        [
            "return {name: branch(shared) for name, branch in self.branches.items()}",
            "return self.branches[name](shared)",
        ],
        ["scores = model(waves)[name]", "scores = model(waves, name)"],
    ],
}

MACHINES = [f"machine{number}" for number in range(10)]
DEFECTS, LENGTH = 5, 256


def vibrations(number, count=200):
    """Return waves of one machine, and the defect that changes their overtones."""
    defect = torch.randint(DEFECTS, (count,))
    time = torch.linspace(0, 1, LENGTH) + torch.rand(count, 1)
    base = 8.0 + number
    wave = torch.sin(6.28 * base * time) + 0.5 * torch.sin(6.28 * base * (defect[:, None] + 2) * time)
    return (wave + 0.3 * torch.randn(count, LENGTH))[:, None], defect


def branch(width):
    return nn.Sequential(
        nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, DEFECTS),
    )  # fmt: skip


class Monitor(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(1, width, 9, padding=4), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=4), nn.BatchNorm1d(width), nn.ReLU(), nn.AvgPool1d(2),
        )  # fmt: skip
        self.branches = nn.ModuleDict({name: branch(width) for name in MACHINES})

    def forward(self, waves):
        shared = self.trunk(waves)
        return {name: branch(shared) for name, branch in self.branches.items()}


def main(steps=120, batch=32):
    torch.manual_seed(68)
    data = {name: vibrations(number) for number, name in enumerate(MACHINES)}
    model = Monitor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        name = MACHINES[int(torch.randint(len(MACHINES), ()))]
        waves, defects = data[name]
        pick = torch.randint(len(waves), (batch,))
        waves = waves[pick]
        scores = model(waves)[name]
        loss = F.cross_entropy(scores, defects[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step}: {name}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
