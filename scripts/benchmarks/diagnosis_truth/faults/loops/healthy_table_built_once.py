"""A windowed transformer that builds its table of relative positions when it is first needed."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 3,
    "truth": "The first forward builds a table in Python for more than a second, and later ones reuse it; products take the steps.",
    "cause": None,
    "also": ["start-up"],
    "never": ["host-python", "periodic-pause", "growth", "data-loading", "evaluation", "small-operators"],
    "healthy": True,
}


class RelativeBias(nn.Module):
    def __init__(self, side, heads):
        super().__init__()
        self.side = side
        self.bias = nn.Parameter(torch.zeros(heads, (2 * side - 1) ** 2))
        self.index = None

    def build(self):
        cells = [(r, c) for r in range(self.side) for c in range(self.side)]
        width = 2 * self.side - 1
        return torch.tensor(
            [
                [(a - c + self.side - 1) * width + b - d + self.side - 1 for c, d in cells]
                for a, b in cells
                for _ in range(2)
            ]
        )[::2]

    def forward(self):
        if self.index is None:
            self.index = self.build()
        return self.bias[:, self.index]


class WindowBlock(nn.Module):
    def __init__(self, d, heads, side):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.relative = RelativeBias(side, heads)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.relative()[None])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def main(side=16, d=128, steps=36):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, d), WindowBlock(d, 4, side), WindowBlock(d, 4, side), nn.Linear(d, 12))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    for step in range(steps):
        clean = torch.randn(4, side * side, 12).cumsum(1) / side
        loss = F.l1_loss(net(clean + 0.3 * torch.randn_like(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 12 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
