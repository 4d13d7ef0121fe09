"""Fine-tuning by low-rank adapters, with frozen base weights and accumulation over two micro-batches."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "generation": 2,
    "truth": "The base is frozen and gets no gradients; its products and those of the adapters take the step.",
    "cause": None,
    "also": [],
    "never": ["unused-gradients", "no-update", "skipped-steps", "gradients-not-cleared", "data-loading", "host-python"],
    "healthy": True,
}


class LoRALinear(nn.Module):
    def __init__(self, base, rank=8, alpha=16):
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)


def inject(module, rank=8):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name in ("q", "v", "up", "down"):
            setattr(module, name, LoRALinear(child, rank))
        else:
            inject(child, rank)
    return module


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self, vocabulary=500, d=256, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.Sequential(*[Block(d) for _ in range(depth)])
        self.head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def main():
    torch.manual_seed(0)
    model = LM().requires_grad_(False)
    inject(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable: {sum(p.numel() for p in trainable):,} of {total:,}")
    optimizer = torch.optim.AdamW(trainable, lr=2e-4, weight_decay=0.0)
    for step in range(24):
        for _ in range(2):
            ids = torch.randint(0, 500, (2, 97))
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
