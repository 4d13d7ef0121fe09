"""Continual learning of permuted digits with elastic weight consolidation."""

import torch
import torch.nn.functional as F
from torch import nn, optim

CASE = {
    "generation": 6,
    "truth": "The penalty has a term for each earlier task and each parameter: steps of the last task take several times those of the first.",
    "cause": "growth",
    "also": ["small-operators", "elementwise-chain", "host-python"],
    "never": ["start-up", "data-loading", "evaluation", "periodic-pause", "logging", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "penalty = penalty + ",
        "for anchor, importance in self.memory",
        "for name, parameter in self.net.named_parameters()",
        "difference = ",
        "self.memory.append(",
        "self.penalty()",
        "loss.backward()",
    ],
    "share": 62,
    "remedy": "keep one sum of the importances and one weighted anchor for all tasks",
    "without": [
        [
            "        self.memory.append((anchor, {n: i / count for n, i in importance.items()}))\n",
            "        importance = {n: i / count for n, i in importance.items()}\n"
            "        if self.memory:\n"
            "            old_anchor, old = self.memory.pop()\n"
            "            total = {n: old[n] + i for n, i in importance.items()}\n"
            "            anchor = {n: (old[n] * old_anchor[n] + importance[n] * a) / (total[n] + 1e-12) for n, a in anchor.items()}\n"
            "            importance = total\n"
            "        self.memory.append((anchor, importance))\n",
        ]
    ],
}


class Net(nn.Module):
    def __init__(self, hidden=360):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class EWC:
    def __init__(self, net, strength):
        self.net, self.strength, self.memory = net, strength, []

    def consolidate(self, x, y, count=8):
        """Remember the weights of this task and how much each of them matters."""
        importance = {n: torch.zeros_like(p) for n, p in self.net.named_parameters()}
        for part_x, part_y in zip(x.chunk(count), y.chunk(count)):
            self.net.zero_grad()
            F.cross_entropy(self.net(part_x), part_y).backward()
            for n, p in self.net.named_parameters():
                importance[n] += p.grad**2
        anchor = {n: p.detach().clone() for n, p in self.net.named_parameters()}
        self.memory.append((anchor, {n: i / count for n, i in importance.items()}))

    def penalty(self):
        penalty = 0
        for anchor, importance in self.memory:
            for name, parameter in self.net.named_parameters():
                difference = parameter - anchor[name]
                penalty = penalty + (importance[name] * difference**2).sum()
        return self.strength * penalty


def make_digits(n=1000):
    prototypes = torch.rand(10, 784)
    y = torch.randint(10, (n,))
    return prototypes[y] + 0.8 * torch.randn(n, 784), y


torch.manual_seed(42)
x, y = make_digits()
net = Net()
ewc = EWC(net, strength=40.0)
optimizer = optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
for task in range(12):
    permuted = x[:, torch.randperm(784)]
    for i in range(30):
        pick = torch.randint(len(x), (48,))
        optimizer.zero_grad()
        loss = F.cross_entropy(net(permuted[pick]), y[pick]) + ewc.penalty()
        loss.backward()
        optimizer.step()
    ewc.consolidate(permuted, y)
    print("task", task, "loss", round(loss.item(), 3))
