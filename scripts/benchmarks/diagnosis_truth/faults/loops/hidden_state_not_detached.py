"""Language model of characters with a GRU that keeps its state from chunk to chunk."""

import torch
import torch.nn as nn

CASE = {
    "generation": 2,
    "truth": "The hidden state is not detached between chunks, so each backward goes through all chunks so far.",
    "cause": "growth",
    "also": ["recomputation"],
    "never": ["start-up", "data-loading", "evaluation", "host-python", "small-operators", "periodic-pause"],
    "healthy": False,
    "place": ["hidden = model(", "loss.backward(retain_graph=True)"],
    "share": 93,
    "remedy": "detach the hidden state between chunks, and leave retain_graph out",
    "without": [["    loss.backward(retain_graph=True)", "    loss.backward()\n    hidden = hidden.detach()"]],
}

TEXT = "the quick brown fox jumps over the lazy dog while the band plays on and nobody minds the rain. " * 120
CHUNK, STREAMS = 16, 16

chars = sorted(set(TEXT))
lookup = {c: i for i, c in enumerate(chars)}
data = torch.tensor([lookup[c] for c in TEXT])
data = data[: len(data) // STREAMS * STREAMS].view(STREAMS, -1)


class CharModel(nn.Module):
    def __init__(self, vocabulary, embed=64, hidden=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, embed)
        self.rnn = nn.GRU(embed, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, x, hidden=None):
        y, hidden = self.rnn(self.embed(x), hidden)
        return self.out(y), hidden


torch.manual_seed(0)
model = CharModel(len(chars))
criterion = nn.CrossEntropyLoss()
lr, total, hidden = 0.05, 0.0, None
starts = range(0, data.shape[1] - CHUNK - 1, CHUNK)[:40]
for step, start in enumerate(starts, 1):
    x, y = data[:, start : start + CHUNK], data[:, start + 1 : start + CHUNK + 1]
    model.zero_grad()
    logits, hidden = model(x, hidden)
    loss = criterion(logits.reshape(-1, len(chars)), y.reshape(-1))
    loss.backward(retain_graph=True)
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    total += loss.item()
    if step % 10 == 0:
        print(f"| {step:3d}/{len(starts)} batches | lr {lr:.2f} | loss {total / 10:5.2f}")
        total = 0.0
