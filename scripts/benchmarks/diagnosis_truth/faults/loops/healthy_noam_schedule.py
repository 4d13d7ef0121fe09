"""A transformer that learns to write dates in the form of a calendar: "the 4th of may 1987" becomes "1987-05-04"."""

import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "The optimizer's rate is 1.0 and the schedule multiplies it by 0.001 at most, rising at first: the schedule of the first transformer, whose factor is the rate itself. The loss falls as it should. 29% of each batch of sources is padding, and without it 150 steps took 3 to 15% less CPU time, so that padding may be named.",
    "cause": None,
    "also": ["padding"],
    "never": ["learning-rate-too-small", "divergence", "no-update", "data-loading", "growth", "logging"],
    "healthy": True,
}

MONTHS = "january february march april may june july august september october november december".split()
SIGNS = ["_", "^"] + list("abcdefghijklmnopqrstuvwxyz0123456789 -")
CODE = {sign: i for i, sign in enumerate(SIGNS)}


def ordinal(day):
    return f"{day}" + ("th" if 4 <= day % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th"))


def spoken():
    year, month, day = random.randrange(1900, 2030), random.randrange(12), random.randrange(1, 29)
    name = MONTHS[month]
    text = random.choice(
        [f"the {ordinal(day)} of {name} {year}", f"{name} {ordinal(day)} {year}", f"{day} {name} {year}"]
    )
    return text, f"^{year}-{month + 1:02d}-{day:02d}"


def encode(texts, length):
    return torch.tensor([[CODE[c] for c in text.ljust(length, "_")] for text in texts])


class Sinusoids(nn.Module):
    def __init__(self, dim, length=64):
        super().__init__()
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("table", torch.stack([angle.sin(), angle.cos()], 2).flatten(1))

    def forward(self, x):
        return x * x.shape[2] ** 0.5 + self.table[: x.shape[1]]


class Writer(nn.Module):
    def __init__(self, dim=64, heads=4, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(len(SIGNS), dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.positions = Sinusoids(dim)
        self.body = nn.Transformer(dim, heads, layers, layers, 2 * dim, dropout=0.05, batch_first=True)
        self.register_buffer("causal", torch.triu(torch.ones(32, 32, dtype=torch.bool), 1))

    def forward(self, source, target):
        n = target.shape[1]
        empty = source == 0
        h = self.body(
            self.positions(self.embedding(source)), self.positions(self.embedding(target)),
            tgt_mask=self.causal[:n, :n], src_key_padding_mask=empty, memory_key_padding_mask=empty,
        )  # fmt: skip
        return h @ self.embedding.weight.t()


def noam(dim, warm):
    return lambda step: dim**-0.5 * min((step + 1) ** -0.5, (step + 1) * warm**-1.5)


def main(steps=240, batch=24, dim=64, warm=1000):
    random.seed(11)
    torch.manual_seed(11)
    pairs = [spoken() for _ in range(4000)]
    model = Writer(dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, noam(dim, warm))
    mean = 0.0
    for step in range(1, steps + 1):
        chosen = random.sample(pairs, batch)
        length = max(len(text) for text, _ in chosen)
        source = encode([text for text, _ in chosen], length)
        target = encode([date for _, date in chosen], 11)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        mean += loss.item() / 40
        if step % 40 == 0:
            print(f"step {step}: loss {mean:.3f}, rate {schedule.get_last_lr()[0]:.6f}")
            mean = 0.0


if __name__ == "__main__":
    main()
