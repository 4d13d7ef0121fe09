"""Reverses strings of letters with an encoder-decoder; all numbers come from a configuration in YAML."""

import argparse

import torch
import yaml
from torch import nn

CASE = {
    "generation": 13,
    "truth": "The warm-up of 4000 steps is copied from a paper, but the whole training has 180: the rate rises to a twentieth of what was asked for, and the training ends.",
    "cause": "learning-rate-too-small",
    "also": ["no-update"],
    "never": ["data-loading", "evaluation", "growth", "host-python", "small-operators", "logging", "start-up"],
    "healthy": False,
    "place": ["warmup_steps: 4000", "scheduler.step()", "LambdaLR(", '/ cfg["warmup_steps"]'],
    "remedy": "a warm-up of about a tenth of the training's own steps",
    "without": [["  warmup_steps: 4000\n", "  warmup_steps: 18\n"]],
    "requires": ["yaml"],
}

CONFIG = """
seed: 3
data:
  length: 20
  letters: 26
model:
  d_model: 96
  nhead: 4
  layers: 2
  ff: 384
train:
  steps: 180
  batch_size: 32
  lr: 0.002
  warmup_steps: 4000
  clip: 1.0
"""


class Reverser(nn.Module):
    def __init__(self, letters, length, d_model, nhead, layers, ff):
        super().__init__()
        self.embed = nn.Embedding(letters + 1, d_model)
        self.place = nn.Parameter(torch.randn(length + 1, d_model) * 0.02)
        self.transformer = nn.Transformer(d_model, nhead, layers, layers, ff, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d_model, letters + 1)

    def forward(self, source, target):
        n = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        a = self.embed(source) + self.place[: source.shape[1]]
        b = self.embed(target) + self.place[:n]
        return self.head(self.transformer(a, b, tgt_mask=mask, tgt_is_causal=True))


def make_batch(count, letters, length):
    words = torch.randint(1, letters + 1, (count, length))
    start = torch.zeros(count, 1, dtype=torch.long)
    return words, torch.cat([start, words.flip(1)], 1)


def build_optimizer(model, cfg):
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.98))

    def factor(step):
        step = step + 1
        return min(step / cfg["warmup_steps"], (cfg["warmup_steps"] / step) ** 0.5)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(cfg):
    torch.manual_seed(cfg["seed"])
    model = Reverser(**cfg["data"], **cfg["model"])
    optimizer, scheduler = build_optimizer(model, cfg["train"])
    criterion = nn.CrossEntropyLoss()
    for step in range(1, cfg["train"]["steps"] + 1):
        source, target = make_batch(cfg["train"]["batch_size"], **cfg["data"])
        logits = model(source, target[:, :-1])
        loss = criterion(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg["train"]["clip"])
        optimizer.step()
        scheduler.step()
        if step % 30 == 0:
            print(f"step {step} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="a file in YAML; default: the numbers above")
    arguments = parser.parse_args()
    text = open(arguments.config).read() if arguments.config else CONFIG
    train(yaml.safe_load(text))
