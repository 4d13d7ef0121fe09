"""Wide layers on short batches, where a fused AdamW has a large share by right."""

import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "Four million weights and batches of 128 rows: a fused AdamW takes a large share, as it must for so few rows.",
    "cause": None,
    "also": [],
    "never": ["unfused-optimizer", "host-python", "data-loading", "dense-gradient"],
    "healthy": True,
}


class Wide(nn.Module):
    def __init__(self, n=1024, hidden=2048):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(n, hidden), nn.Linear(hidden, n), nn.LayerNorm(n)

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.silu(self.up(x))))


def stream(batch):
    basis = torch.randn(16, 1024)
    while True:
        x = torch.randn(batch, 16) @ basis
        yield x, x.roll(1, 1)


def train(model, batches, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    for step in range(steps):
        x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Wide(), stream(128), 40)
