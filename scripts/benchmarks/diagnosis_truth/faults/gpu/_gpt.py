"""Decoder of a language model, as small training repositories write it."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, d_model, heads, fused=True):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
            causal = torch.tril(torch.ones(t, t, device=x.device, dtype=torch.bool))
            y = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d_model, heads, fused=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model, heads, fused)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=32768, d_model=768, layers=8, heads=12, context=1024, fused=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d_model), nn.Embedding(context, d_model)
        self.blocks = nn.ModuleList([Block(d_model, heads, fused) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab, bias=False)

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(steps, batch, context, vocab=32768, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, vocab, (1_000_000,), generator=generator).to(device)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - context - 1, (batch, 1), generator=generator).to(device)
        window = data[starts + torch.arange(context + 1, device=device)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
