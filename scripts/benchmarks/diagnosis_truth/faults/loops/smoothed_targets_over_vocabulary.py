"""Titles from keywords: a recurrent decoder with label smoothing."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Label smoothing makes a dense distribution over the vocabulary for each word of the batch, and a divergence of it from log_softmax, instead of one fused loss: 35% of the loop's time.",
    "cause": "elementwise-chain",
    "also": ["needless-copies"],
    "never": ["data-loading", "growth", "evaluation", "logging", "checkpoint-writing", "start-up", "small-operators"],
    "healthy": False,
    "place": [
        "spread = torch.full_like(scores, self.smoothing / (self.words - 1))",
        "spread.scatter_(1, wanted[:, None], 1 - self.smoothing)",
        "spread[wanted == PAD] = 0",
        "logs = scores.log_softmax(1)",
        'return F.kl_div(logs, spread, reduction="sum") / (wanted != PAD).sum()',
        "loss = criterion(scores.flatten(0, 1), titles[:, 1:].flatten())",
    ],
    "share": 35,
    "remedy": "use F.cross_entropy with label_smoothing and ignore_index",
    "without": [
        [
            "        logs = scores.log_softmax(1)\n",
            "        return F.cross_entropy(scores, wanted, ignore_index=PAD, label_smoothing=self.smoothing)\n",
        ],
    ],
}

WORDS, PAD, KEYS = 12000, 0, 6


class SmoothedLoss(nn.Module):
    """Divergence from the target, smoothed over the whole vocabulary."""

    def __init__(self, words, smoothing=0.1):
        super().__init__()
        self.words, self.smoothing = words, smoothing

    def forward(self, scores, wanted):
        logs = scores.log_softmax(1)
        spread = torch.full_like(scores, self.smoothing / (self.words - 1))
        spread.scatter_(1, wanted[:, None], 1 - self.smoothing)
        spread[wanted == PAD] = 0
        return F.kl_div(logs, spread, reduction="sum") / (wanted != PAD).sum()


def papers(count, length=13):
    """Return keywords and titles that repeat them between words of their field."""
    field = torch.randint(50, (count, 1))
    keys = 1 + (field * 200 + torch.randint(200, (count, KEYS))) % (WORDS - 1)
    filler = 10001 + torch.randint(1800, (count, length))
    order = torch.randint(KEYS, (count, length))
    titles = torch.where(torch.rand(count, length) < 0.6, keys.gather(1, order), filler)
    ends = torch.randint(9, length + 1, (count, 1))
    return keys, titles.masked_fill(torch.arange(length) >= ends, PAD)


class Writer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PAD, sparse=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.project = nn.Linear(width, WORDS)

    def forward(self, keys, titles):
        start = self.words(keys).mean(1)[None]
        return self.project(self.decoder(self.words(titles), start)[0])


def main(steps=70, batch=24):
    torch.manual_seed(67)
    keys, whole = papers(3000)
    model = Writer()
    criterion = SmoothedLoss(WORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        pick = torch.randint(len(keys), (batch,))
        titles = whole[pick]
        scores = model(keys[pick], titles[:, :-1])
        loss = criterion(scores.flatten(0, 1), titles[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
