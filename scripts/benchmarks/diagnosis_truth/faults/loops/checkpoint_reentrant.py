"""Activation checkpointing of every block of a small model, in the reentrant form."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CASE = {
    "truth": "The forward of every block runs again inside backward (activation checkpointing): a fifth of the step.",
    "cause": "recomputation",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "duplicate-forward"],
    "healthy": False,
}


class Model(nn.Module):
    def __init__(self, width=512, depth=6):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x


torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(36):
    x = torch.randn(256, 512, requires_grad=True)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
