"""A recurrent language model of arithmetic written out in characters."""

import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "`trainable` is an iterator that the optimizer's constructor has used up; clip_grad_norm_ gets nothing from it, so no gradient is ever clipped and the training blows up. Measured: the loss is NaN by step 20; without the fault 2.68 at step 20 and 1.54 after 200 steps.",
    "cause": "divergence",
    "also": ["nan-loss"],
    "never": ["data-loading", "logging", "evaluation", "growth", "no-update", "start-up", "padding", "host-python"],
    "healthy": False,
    "place": ["trainable = filter(", "clip_grad_norm_(trainable", "torch.optim.SGD(trainable"],
    "remedy": "make a list of the filter",
    "without": [
        [
            "    trainable = filter(lambda p: p.requires_grad, model.parameters())\n",
            "    trainable = list(filter(lambda p: p.requires_grad, model.parameters()))\n",
        ]
    ],
}

ALPHABET = "0123456789+-=; "


class CharacterRNN(nn.Module):
    def __init__(self, characters, dim=32, hidden=160):
        super().__init__()
        self.embedding = nn.Embedding(characters, dim)
        self.rnn = nn.RNN(dim, hidden, num_layers=2, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(hidden, characters)
        for name, weight in self.rnn.named_parameters():
            if "weight_hh" in name:
                nn.init.eye_(weight)

    def forward(self, x):
        h, _ = self.rnn(self.embedding(x))
        return self.head(h)


def sums(count):
    lines = []
    for _ in range(count):
        a, b = random.randrange(100), random.randrange(100)
        lines.append(f"{a}+{b}={a + b}; " if random.random() < 0.5 else f"{a}-{b}={a - b}; ")
    return "".join(lines)


def batches(text, batch, length):
    codes = torch.tensor([ALPHABET.index(c) for c in text])
    while True:
        starts = torch.randint(len(codes) - length - 1, (batch,))
        window = codes[starts[:, None] + torch.arange(length + 1)]
        yield window[:, :-1], window[:, 1:]


def main(steps=200, batch=24, length=48):
    random.seed(1)
    torch.manual_seed(1)
    model = CharacterRNN(len(ALPHABET))
    trainable = filter(lambda p: p.requires_grad, model.parameters())
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    stream = batches(sums(4000), batch, length)
    for step in range(steps):
        x, y = next(stream)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 0.5)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}: {loss.item():.4g} nats per character")


if __name__ == "__main__":
    main()
