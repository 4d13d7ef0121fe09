"""Texts that are tokenized in the loader of a single process."""

import random
import re
from collections import Counter

import torch
from torch import nn
from torch.utils.data import DataLoader

CASE = {
    "truth": "collate_fn splits and encodes its texts with a Python byte-pair merge, several times the model's time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "padding"],
    "healthy": False,
}

random.seed(0)
WORDS = ["".join(random.choices("etaoinshrdlu", k=random.randint(3, 9))) for _ in range(400)]
TEXTS = [" ".join(random.choices(WORDS, k=120)) for _ in range(320)]


def learn(texts, merges=40):
    pairs = Counter()
    for word in re.findall(r"\w+", " ".join(texts[:20])):
        pairs.update(zip(word, word[1:]))
    return [a + b for (a, b), _ in pairs.most_common(merges)]


MERGES = learn(TEXTS)
IDS = {t: i + 30 for i, t in enumerate(MERGES)}


def encode(text):
    ids = []
    for word in re.findall(r"\w+", text):
        pieces = list(word)
        for merge in MERGES:
            i = 0
            while i < len(pieces) - 1:
                if pieces[i] + pieces[i + 1] == merge:
                    pieces[i : i + 2] = [merge]
                else:
                    i += 1
        ids += [IDS.get(p) or ord(p[0]) % 30 for p in pieces]
    return ids[:256] + [0] * max(0, 256 - len(ids))


def collate(texts):
    return torch.tensor([encode(t) for t in texts])


class Local(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(100, 32)
        self.conv = nn.Conv1d(32, 32, 5, padding=4)
        self.head = nn.Linear(32, 100)

    def forward(self, x):
        h = torch.relu(self.conv(self.e(x).transpose(1, 2))[..., : x.shape[1]])
        return self.head(h.transpose(1, 2))


torch.manual_seed(0)
model = Local()
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
for tokens in DataLoader(TEXTS, batch_size=8, collate_fn=collate):
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
