"""A nanoGPT-like model with a sliding window, and a mask that loops fill in each forward."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

CASE = {
    "generation": 2,
    "truth": "Each block's attention fills its mask of 160 × 160 by two Python loops in each forward: most of the step.",
    "cause": "host-python",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "growth", "unfused-attention"],
    "healthy": False,
    "place": ["mask = self.build_mask(T)", "rows[i][j] = ", "for j in range(", "if j <= i", "torch.tensor(rows)"],
    "share": 56,
    "remedy": "make the mask once with torch.ones().tril().triu(), and keep it in a buffer",
    "without": [
        [
            "        mask = self.build_mask(T)\n",
            "        mask = self.mask if hasattr(self, 'mask') else self.build_mask(T)\n        self.mask = mask\n",
        ]
    ],
}


@dataclass
class GPTConfig:
    block_size: int = 160
    vocab_size: int = 65
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 64
    window: int = 64


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.window = config.n_head, config.window

    def build_mask(self, T):
        rows = [[False] * T for _ in range(T)]
        for i in range(T):
            for j in range(T):
                if j <= i and i - j < self.window:
                    rows[i][j] = True
        return torch.tensor(rows)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        mask = self.build_mask(T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), CausalSelfAttention(config)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding(config.vocab_size, config.n_embd),
            nn.Embedding(config.block_size, config.n_embd),
        )
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


config = GPTConfig()
torch.manual_seed(1337)
data = torch.randint(0, config.vocab_size, (20_000,))
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
max_iters, warmup_iters = 40, 10
for it in range(max_iters):
    lr = 1e-3 * min(1, (it + 1) / warmup_iters) * 0.5 * (1 + math.cos(math.pi * it / max_iters))
    for group in optimizer.param_groups:
        group["lr"] = lr
    ix = torch.randint(len(data) - config.block_size - 1, (4,)).tolist()
    X = torch.stack([data[i : i + config.block_size] for i in ix])
    Y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in ix])
    logits, loss = model(X, Y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if it % 20 == 0:
        print(f"iter {it}: loss {loss.item():.4f}")
