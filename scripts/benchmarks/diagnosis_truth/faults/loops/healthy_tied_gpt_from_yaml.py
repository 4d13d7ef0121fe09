"""A GPT of characters with tied weights, groups of weight decay, accumulation and warm-up, all set in YAML."""

import math
import time

import torch
import torch.nn.functional as F
import yaml
from torch import nn

CASE = {
    "generation": 13,
    "truth": "Gradients of three micro-batches add up before each update on purpose, the head shares the embedding's weights, the mask is a buffer made once, and the rate begins small and ends at a tenth: nothing to mend. Products take the time.",
    "cause": None,
    "also": [],
    "never": [
        "gradients-not-cleared",
        "skipped-steps",
        "learning-rate-too-small",
        "logging",
        "data-loading",
        "evaluation",
        "host-python",
    ],
    "healthy": True,
    "requires": ["yaml"],
}

SETTINGS = yaml.safe_load("""
model: {layers: 3, heads: 4, width: 160, context: 64}
optim: {lr: 2.0e-3, decay: 0.1, warmup: 5, steps: 45, accumulate: 3, batch: 12}
log_every: 15
""")
TEXT = "".join(f"{a} times {b} is {a * b}, and {a} plus {b} is {a + b}; " for a in range(3, 60) for b in range(2, 30))
ALPHABET = sorted(set(TEXT))
DATA = torch.tensor([ALPHABET.index(c) for c in TEXT])


class Layer(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:t, :t])
        x = x + self.project(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, layers, heads, width, context):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Layer(width, heads, context) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.apply(self.start)
        self.head.weight = self.tokens.weight

    @staticmethod
    def start(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, y):
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def rate(step, lr, warmup, steps, **_):
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def batch(count, context):
    starts = torch.randint(len(DATA) - context - 1, (count, 1))
    rows = DATA[starts + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


def main(model, optim, log_every):
    torch.manual_seed(1)
    net = GPT(**model)
    wide = [p for p in net.parameters() if p.dim() >= 2]
    narrow = [p for p in net.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": optim["decay"]}, {"params": narrow, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    began = time.perf_counter()
    for step in range(optim["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, **optim)
        total = 0.0
        for _ in range(optim["accumulate"]):
            loss = net(*batch(optim["batch"], model["context"])) / optim["accumulate"]
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % log_every == log_every - 1:
            spent, began = time.perf_counter() - began, time.perf_counter()
            print(f"step {step + 1}: loss {total:.3f}, norm {norm:.2f}, {1000 * spent / log_every:.0f} ms a step")


if __name__ == "__main__":
    main(**SETTINGS)
