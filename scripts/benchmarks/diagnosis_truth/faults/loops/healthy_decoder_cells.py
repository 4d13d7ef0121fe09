"""A sequence-to-sequence model with attention at each decoded word, so that its loop over time is unavoidable."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "The decoder's loop feeds each word back; its cells and attention are large products, which take the time.",
    "cause": None,
    "also": [],
    "never": ["small-operators", "host-python", "unfused-attention", "data-loading", "growth", "host-sync"],
    "healthy": True,
}


class Encoder(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d // 2, batch_first=True, bidirectional=True)

    def forward(self, tokens):
        return self.rnn(self.emb(tokens))[0]


class Decoder(nn.Module):
    """Bahdanau attention with input feeding."""

    def __init__(self, vocab, d):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.cell = nn.LSTMCell(2 * d, d)
        self.query, self.combine = nn.Linear(d, d, bias=False), nn.Linear(2 * d, d)
        self.out = nn.Linear(d, vocab)

    def forward(self, memory, target, teacher_forcing):
        batch, d = memory.shape[0], memory.shape[2]
        h = memory.mean(1)
        c, feed = torch.zeros_like(h), torch.zeros_like(h)
        word, logits = target[:, 0], []
        for t in range(1, target.shape[1]):
            h, c = self.cell(torch.cat([self.emb(word), feed], 1), (h, c))
            weights = torch.bmm(memory, self.query(h).unsqueeze(2)).squeeze(2).softmax(1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            feed = torch.tanh(self.combine(torch.cat([h, context], 1)))
            step = self.out(feed)
            logits.append(step)
            word = target[:, t] if random.random() < teacher_forcing else step.argmax(1)
        return torch.stack(logits, 1)


class Seq2Seq(nn.Module):
    def __init__(self, vocab=1000, d=256):
        super().__init__()
        self.encoder, self.decoder = Encoder(vocab, d), Decoder(vocab, d)

    def forward(self, source, target, teacher_forcing=0.5):
        return self.decoder(self.encoder(source), target, teacher_forcing)


def reversal(batch, length, vocab):
    source = torch.randint(2, vocab, (batch, length))
    return source, torch.cat([torch.ones(batch, 1, dtype=torch.long), source.flip(1)], 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--length", type=int, default=10)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        source, target = reversal(args.batch, args.length, 1000)
        logits = model(source, target)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"{step}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
