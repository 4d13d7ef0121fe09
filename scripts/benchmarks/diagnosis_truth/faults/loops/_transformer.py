"""A small transformer that several of the scripts train."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d=128, h=4, kv=None, sdpa=True, causal=True):
        super().__init__()
        kv = kv or h
        self.h, self.kv, self.causal, self.sdpa = h, kv, causal, sdpa
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = (nn.Linear(d, kv * d // h, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        y, size = self.n1(x), D // self.h
        q = self.q(y).view(B, T, self.h, size).transpose(1, 2)
        k = self.k(y).view(B, T, self.kv, size).transpose(1, 2)
        v = self.v(y).view(B, T, self.kv, size).transpose(1, 2)
        if self.sdpa:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.kv != self.h)
        else:
            w = q @ k.transpose(-1, -2) / size**0.5
            if self.causal:
                w = w.masked_fill(torch.triu(torch.ones(T, T, dtype=torch.bool), 1), float("-inf"))
            a = w.softmax(-1) @ v
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self, V=512, d=128, L=2, ckpt=False, **rest):
        super().__init__()
        self.e, self.n = nn.Embedding(V, d), nn.LayerNorm(d)
        self.b = nn.ModuleList(Block(d, **rest) for _ in range(L))
        self.head = nn.Linear(d, V, bias=False)
        self.ckpt = ckpt

    def forward(self, ids):
        x = self.e(ids)
        for block in self.b:
            x = checkpoint(block, x, use_reentrant=False) if self.ckpt else block(x)
        return self.head(self.n(x))


def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
