"""Q-learning that copies its target network with deepcopy after every step."""

import copy
import random

import torch
import torch.nn as nn

CASE = {
    "truth": "copy.deepcopy of the network after every step takes most of the time; the update itself is small.",
    "cause": "host-python",
    "also": ["checkpoint-writing", "model-copies"],
    "never": ["data-loading", "evaluation", "start-up"],
    "healthy": False,
}

random.seed(3)
torch.manual_seed(3)


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 4)
        )

    def forward(self, s):
        return self.body(s)


q = QNet()
target = copy.deepcopy(q)
optim = torch.optim.SGD(q.parameters(), lr=1e-3)
memory = [(torch.randn(1500), random.randrange(4), random.random(), torch.randn(1500)) for _ in range(64)]

for t in range(45):
    batch = random.sample(memory, 2)
    s = torch.stack([b[0] for b in batch])
    a = torch.tensor([b[1] for b in batch])
    r = torch.tensor([b[2] for b in batch])
    s2 = torch.stack([b[3] for b in batch])
    with torch.no_grad():
        y = r + 0.99 * target(s2).max(1).values
    loss = nn.functional.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), y)
    optim.zero_grad()
    loss.backward()
    optim.step()
    for _ in range(3):
        target = copy.deepcopy(q)
