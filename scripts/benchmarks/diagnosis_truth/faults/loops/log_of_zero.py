"""A loss written by hand takes the logarithm of a probability that becomes zero after some steps."""

import torch
from torch import nn

CASE = {
    "truth": "The loss becomes NaN at step 12 (the logarithm of zero times zero), and all weights with it.",
    "cause": "nan-loss",
    "also": ["divergence"],
    "never": ["start-up", "data-loading", "evaluation", "skipped-steps"],
    "healthy": False,
}


def entropy(p):
    return -(p * p.log()).sum(-1).mean()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 6))

    def forward(self, x, temperature):
        return torch.softmax(self.body(x) / temperature, -1)


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for step in range(50):
    p = policy(torch.randn(128, 16), temperature=1.0 if step < 12 else 1e-4)
    loss = p[:, 0].mean() - 0.01 * entropy(p)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
