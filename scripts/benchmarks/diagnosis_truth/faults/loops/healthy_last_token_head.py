"""Addition modulo 97 with a small transformer, of which only the last position is read."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 14,
    "truth": "The loss reads the last position only, and the model slices it before the head; other positions feed it through attention. The last block normalises and mixes one position. Products take the time.",
    "cause": None,
    "also": [],
    "never": ["unused-outputs", "unused-gradients", "cut-gradients", "unfused-attention", "data-loading", "no-update"],
    "healthy": True,
}


@dataclass(frozen=True)
class Config:
    modulus: int = 97
    terms: int = 15
    width: int = 128
    heads: int = 4
    batch: int = 96
    steps: int = 80
    lr: float = 1e-3


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, keep=None):
        h = self.a(x)
        if keep is not None:
            x = x[:, -keep:]
        q = self.query(h if keep is None else h[:, -keep:])
        k, v = self.pair(h).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=keep is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.b(x))


class Adder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.digits = nn.Embedding(c.modulus + 1, c.width)
        self.place = nn.Parameter(0.02 * torch.randn(c.terms + 1, c.width))
        self.first, self.middle, self.last = (Block(c.width, c.heads) for _ in range(3))
        self.head = nn.Linear(c.width, c.modulus)

    def forward(self, tokens):
        x = self.middle(self.first(self.digits(tokens) + self.place))
        return self.head(self.last(x, keep=1)[:, -1])


def batch(c):
    terms = torch.randint(c.modulus, (c.batch, c.terms))
    return F.pad(terms, (0, 1), value=c.modulus), terms[:, :2].sum(1) % c.modulus


def main(c=Config()):
    torch.manual_seed(97)
    model = Adder(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, weight_decay=0.5, fused=True)
    for step in range(c.steps):
        tokens, result = batch(c)
        loss = F.cross_entropy(model(tokens), result)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
