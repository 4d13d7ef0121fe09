"""Small language model of letters, with gradients of four small batches added up before each update."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "Gradients of four micro-batches add up on purpose, each loss is divided by four, and they are cleared after each update; products of the transformer take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "gradients-not-cleared",
        "repeated-backward",
        "duplicate-forward",
        "skipped-steps",
        "periodic-pause",
        "data-loading",
        "growth",
        "learning-rate-too-small",
        "recomputation",
    ],
    "healthy": True,
}

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


class Corpus:
    """Text of invented words, which follow each other in a few fixed patterns."""

    def __init__(self, words=40000):
        lengths = torch.randint(2, 8, (120,)).tolist()
        known = [torch.randint(26, (length,)) for length in lengths]
        order = [0]
        for jump in torch.randint(1, 6, (words,)).tolist():
            order.append((order[-1] * 3 + jump) % len(known))
        space = torch.tensor([LETTERS.index(" ")])
        self.text = torch.cat([piece for index in order for piece in (known[index], space)])

    def sample(self, rows, length):
        start = torch.randint(len(self.text) - length - 1, (rows, 1))
        window = self.text[start + torch.arange(length + 1)]
        return window[:, :-1], window[:, 1:]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, dim=128, depth=2, heads=4, length=64):
        super().__init__()
        self.token, self.place = nn.Embedding(len(LETTERS), dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, len(LETTERS), bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, letters):
        x = self.token(letters) + self.place.weight[: letters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main(updates=60, accumulate=4, rows=8, length=64):
    torch.manual_seed(19)
    corpus, model = Corpus(), LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    optimizer.zero_grad()
    running = 0.0
    for micro in range(1, updates * accumulate + 1):
        letters, following = corpus.sample(rows, length)
        logits = model(letters)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten()) / accumulate
        loss.backward()
        running += loss.item()
        if micro % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm.step()
            optimizer.zero_grad()
            update = micro // accumulate
            if update % 12 == 0:
                print(f"update {update}: loss {running / 12:.3f}")
                running = 0.0


if __name__ == "__main__":
    main()
