"""Histograms of all weights and gradients in each step, as logging tools offer."""

import numpy as np
import torch
from torch import nn

CASE = {
    "truth": "NumPy histograms of every weight and gradient, for a log, take nearly all of each step.",
    "cause": "logging",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}


class Writer:
    def __init__(self):
        self.events = []

    def add_histogram(self, tag, values, step):
        counts, edges = np.histogram(values, bins=64)
        self.events.append((tag, step, counts.tolist(), edges.tolist()))

    def add_scalar(self, tag, value, step):
        self.events.append((tag, step, float(value)))


torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)], nn.Linear(256, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
writer = Writer()
for step in range(40):
    x = torch.randn(32, 256)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss, step)
    for name, p in model.named_parameters():
        writer.add_histogram("weights/" + name, p.detach().numpy(), step)
        writer.add_histogram("grads/" + name, p.grad.numpy(), step)
print(len(writer.events))
