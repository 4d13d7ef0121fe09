"""After each step the accuracy on a fixed part of the training set is computed."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "truth": "Every step is followed by a forward over 4,000 samples for the training accuracy, five times the step itself.",
    "cause": "evaluation",
    "also": ["host-python", "logging", "duplicate-forward"],
    "never": ["start-up", "data-loading", "growth"],
    "healthy": False,
}

torch.manual_seed(0)
X, Y = torch.randn(4000, 300), torch.randint(0, 20, (4000,))
net = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Dropout(0.1), nn.Linear(700, 20))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)


def accuracy():
    net.eval()
    with torch.no_grad():
        hits = (net(X).argmax(1) == Y).float().mean().item()
    net.train()
    return hits


history = []
for i in range(60):
    index = torch.randint(0, 4000, (64,))
    opt.zero_grad()
    F.cross_entropy(net(X[index]), Y[index]).backward()
    opt.step()
    history.append(accuracy())
print(history[-1])
