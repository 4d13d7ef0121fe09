"""Dates in words to numbers by two recurrent networks with an optimizer each, after the well-known tutorial."""

import random

import torch
import torch.nn as nn
from torch import optim

CASE = {
    "generation": 13,
    "truth": "encoder_optimizer.zero_grad() stands twice in the step and decoder_optimizer.zero_grad() not at all: the gradients of the decoder add up over all steps.",
    "cause": "gradients-not-cleared",
    "also": ["divergence"],
    "never": ["data-loading", "evaluation", "growth", "host-python", "small-operators", "logging", "start-up"],
    "healthy": False,
    "place": ["encoder_optimizer.zero_grad()", "decoder_optimizer = ", "decoder_optimizer.step()", "loss.backward()"],
    "remedy": "clear the decoder's gradients too",
    "without": [
        [
            "    encoder_optimizer.zero_grad()\n    encoder_optimizer.zero_grad()\n",
            "    encoder_optimizer.zero_grad()\n    decoder_optimizer.zero_grad()\n",
        ]
    ],
}

MONTHS = "january february march april may june july august september october november december".split()
CHARS = "^ abcdefghijklmnopqrstuvwxyz0123456789-"
CODE = {c: i for i, c in enumerate(CHARS)}


def pair():
    day, month, year = random.randint(1, 28), random.randint(1, 12), random.randint(1900, 2029)
    words = f"{day} {MONTHS[month - 1]} {year}".ljust(17)
    return [CODE[c] for c in words], [CODE[c] for c in f"^{year}-{month:02d}-{day:02d}"]


class EncoderRNN(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(len(CHARS), 48)
        self.gru = nn.GRU(48, hidden_size, batch_first=True)

    def forward(self, x):
        return self.gru(self.embedding(x))[1]


class DecoderRNN(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(len(CHARS), 48)
        self.gru = nn.GRU(48, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, len(CHARS))

    def forward(self, target, hidden):
        return self.out(self.gru(self.embedding(target), hidden)[0])


def train_step(source, target, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    encoder_optimizer.zero_grad()
    encoder_optimizer.zero_grad()
    scores = decoder(target[:, :-1], encoder(source))
    loss = criterion(scores.transpose(1, 2), target[:, 1:])
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.item()


def train_iters(n_iters, print_every=50, learning_rate=0.05):
    encoder, decoder = EncoderRNN(192), DecoderRNN(192)
    encoder_optimizer = optim.SGD(encoder.parameters(), lr=learning_rate, momentum=0.9)
    decoder_optimizer = optim.SGD(decoder.parameters(), lr=learning_rate, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    print_loss_total = 0
    for n in range(1, n_iters + 1):
        source, target = (torch.tensor(part) for part in zip(*[pair() for _ in range(64)], strict=True))
        print_loss_total += train_step(
            source, target, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion
        )
        if n % print_every == 0:
            print(f"{n} ({n / n_iters:.0%}) {print_loss_total / print_every:.4f}")
            print_loss_total = 0


if __name__ == "__main__":
    random.seed(2)
    torch.manual_seed(2)
    train_iters(250)
