"""A small GPT that learns to sort digits, in the style of a well-known short repository, but with fixed positions."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

CASE = {
    "generation": 13,
    "truth": "Each forward fills the table of sines and cosines of the positions anew, number by number in two Python loops, although it never changes.",
    "cause": "host-python",
    "also": ["small-operators"],
    "never": ["data-loading", "evaluation", "growth", "start-up", "logging", "periodic-pause"],
    "healthy": False,
    "place": ["table[pos, i]", "table[pos, i + 1]", "self.positions(t)"],
    "remedy": "fill the table once in __init__ and keep it as a buffer",
    "without": [
        [
            "        x = self.drop(self.wte(idx) + self.positions(t))\n",
            '        if not hasattr(self, "table"):\n            self.table = self.positions(self.config.block_size)\n        x = self.drop(self.wte(idx) + self.table[:t])\n',
        ]
    ],
}


class Config:
    n_layer, n_head, n_embd, vocab_size, block_size, dropout = 3, 4, 96, 10, 48, 0.1


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def positions(self, length):
        table = torch.zeros(length, self.config.n_embd)
        for pos in range(length):
            for i in range(0, self.config.n_embd, 2):
                table[pos, i] = math.sin(pos / 10000 ** (i / self.config.n_embd))
                table[pos, i + 1] = math.cos(pos / 10000 ** (i / self.config.n_embd))
        return table

    def forward(self, idx, targets):
        t = idx.size(1)
        x = self.drop(self.wte(idx) + self.positions(t))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


def get_batch(batch_size, half):
    digits = torch.randint(10, (batch_size, half))
    line = torch.cat([digits, digits.sort(1).values], 1)
    x, y = line[:, :-1], line[:, 1:].clone()
    y[:, : half - 1] = -1
    return x, y


torch.manual_seed(1337)
config = Config()
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
max_iters, log_interval = 160, 40
for it in range(max_iters):
    x, y = get_batch(32, config.block_size // 2)
    _, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if it % log_interval == log_interval - 1:
        print(f"iter {it + 1}: loss {loss.item():.3f}")
