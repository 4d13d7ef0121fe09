"""Contrastive learning with a queue of negatives inside the model."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 7,
    "truth": "The queue of 60,000 negatives is copied whole in each step, to put 128 new rows at its end.",
    "cause": "needless-copies",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": "self.queue = torch.cat(",
    "share": 55,
    "remedy": "write the new rows in place, at a position that goes around",
    "without": [
        [
            "        self.queue = torch.cat([self.queue[len(k) :], k.detach()])\n",
            "        self.queue[: len(k)] = k.detach()\n",
        ]
    ],
}


class Contrast(nn.Module):
    def __init__(self, width=256, code=128, negatives=60_000):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, code))
        self.register_buffer("queue", F.normalize(torch.randn(negatives, code), dim=1))

    def forward(self, a, b):
        q, k = F.normalize(self.encoder(a), dim=1), F.normalize(self.encoder(b), dim=1)
        drawn = self.queue[torch.randint(len(self.queue), (1024,))].clone()
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ drawn.T], 1) / 0.1
        self.queue = torch.cat([self.queue[len(k) :], k.detach()])
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def main(steps=100):
    torch.manual_seed(0)
    model = Contrast()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x = torch.randn(128, 256)
        loss = model(x + 0.1 * torch.randn_like(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


main()
