"""Character model of chess openings, with the utilisation of the machine in its log."""

import random
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

CASE = {
    "generation": 6,
    "truth": "Each step runs under FlopCounterMode for a log line of the utilisation: every operator goes through its Python code.",
    "cause": "own-profiler",
    "also": ["host-python", "logging", "small-operators"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "FlopCounterMode(",
        "with counter",
        "loss.backward()",
        "logits = ",
        "self.model(",
        "counter.get_total_flops()",
    ],
    "share": 57,
    "remedy": "count the operations of one step before the loop",
    "without": [
        [
            "            counter = FlopCounterMode(display=False)\n            with counter:\n",
            "            counter = type('Once', (), {'get_total_flops': lambda self: 1e8})()\n            if True:\n",
        ]
    ],
}


@dataclass
class Config:
    context: int = 48
    batch: int = 8
    layers: int = 6
    heads: int = 4
    width: int = 64
    steps: int = 120
    lr: float = 2e-3


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.norm_a, self.norm_m = nn.LayerNorm(cfg.width), nn.LayerNorm(cfg.width)
        self.qkv, self.out = nn.Linear(cfg.width, 3 * cfg.width), nn.Linear(cfg.width, cfg.width)
        self.mlp = nn.Sequential(nn.Linear(cfg.width, 4 * cfg.width), nn.GELU(), nn.Linear(4 * cfg.width, cfg.width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_m(x))


class Model(nn.Module):
    def __init__(self, cfg, characters):
        super().__init__()
        self.token = nn.Embedding(characters, cfg.width)
        self.place = nn.Embedding(cfg.context, cfg.width)
        self.blocks = nn.Sequential(*[Block(cfg) for _ in range(cfg.layers)])
        self.head = nn.Linear(cfg.width, characters)

    def forward(self, ids):
        return self.head(self.blocks(self.token(ids) + self.place.weight[: ids.shape[1]]))


def games(count, rng):
    """Moves such as 'Nf3 d5 c4 ', in the order of a few openings."""
    openings = ["e4 e5 Nf3 Nc6 Bb5 a6", "d4 d5 c4 e6 Nc3 Nf6", "c4 e5 Nc3 Nf6 g3 d5", "e4 c5 Nf3 d6 d4 cxd4 Nxd4 Nf6"]
    ends = ["1-0", "0-1", "1/2"]
    return " ".join(f"{rng.choice(openings)} {rng.choice(ends)}" for _ in range(count))


class Trainer:
    peak_flops = 30e9

    def __init__(self, cfg):
        self.cfg = cfg
        text = games(3000, random.Random(0))
        letters = sorted(set(text))
        self.data = torch.tensor([letters.index(c) for c in text])
        self.model = Model(cfg, len(letters))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.1)

    def batch(self):
        start = torch.randint(len(self.data) - self.cfg.context - 1, (self.cfg.batch, 1))
        ids = self.data[start + torch.arange(self.cfg.context + 1)]
        return ids[:, :-1], ids[:, 1:]

    def fit(self):
        for step in range(self.cfg.steps):
            began = time.perf_counter()
            ids, labels = self.batch()
            self.optimizer.zero_grad(set_to_none=True)
            counter = FlopCounterMode(display=False)
            with counter:
                logits = self.model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                loss.backward()
            self.optimizer.step()
            utilisation = counter.get_total_flops() / (time.perf_counter() - began) / self.peak_flops
            if step % 30 == 0:
                print(f"step {step:4d} | loss {loss.item():.3f} | MFU {utilisation:.1%}")


if __name__ == "__main__":
    torch.manual_seed(1337)
    Trainer(Config()).fit()
