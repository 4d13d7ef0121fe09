"""A language model with sequences that become longer by a schedule, as a curriculum."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 2,
    "truth": "Steps become slower as the schedule makes the sequences longer; each is as fast as its products allow.",
    "cause": None,
    "also": [],
    "never": ["growth", "padding", "recompilation", "data-loading", "host-python"],
    "healthy": True,
}


class RotaryAttention(nn.Module):
    def __init__(self, d, heads, longest=512):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        inverse = 1.0 / (10000 ** (torch.arange(0, d // heads, 2) / (d // heads)))
        angles = torch.arange(longest)[:, None] * inverse
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def rotate(self, x):
        left, right = x.chunk(2, -1)
        t = x.shape[-2]
        return x * self.cos[:t] + torch.cat([-right, left], -1) * self.sin[:t]

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(d), nn.LayerNorm(d), RotaryAttention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


def length_at(step, steps, shortest=48, longest=208):
    return shortest + (longest - shortest) * step // steps // 8 * 8


def main(steps=40):
    torch.manual_seed(0)
    text = torch.randint(0, 256, (60_000,))
    embed, head = nn.Embedding(256, 192), nn.Linear(192, 256, bias=False)
    nn.init.normal_(embed.weight, std=0.02)
    head.weight = embed.weight
    model = nn.Sequential(embed, *[Block(192, 6) for _ in range(2)], nn.LayerNorm(192), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, foreach=True)
    for step in range(steps):
        length = length_at(step, steps)
        starts = torch.randint(0, len(text) - length - 1, (4, 1))
        ids = text[starts + torch.arange(length + 1)]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} length {length} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
