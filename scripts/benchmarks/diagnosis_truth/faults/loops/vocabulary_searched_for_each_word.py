"""Sentiment of film reviews by an embedding and a convolution: a first notebook."""

# %%
import random
from collections import Counter

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 13,
    "truth": "The vocabulary is a list, and __getitem__ finds the number of each word by vocab.index(word), which compares up to 4000 words; a dictionary would find it at once.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["evaluation", "growth", "start-up", "logging", "padding"],
    "healthy": False,
    "place": ["self.vocab.index(w)", "in tqdm(train_loader"],
    "remedy": "look words up in a dictionary from word to number, or encode the texts once",
    "without": [
        ["[self.vocab.index(w) for w in words]", "[self.lookup[w] for w in words]"],
        ["        self.vocab = vocab\n", "        self.lookup = {w: i for i, w in enumerate(vocab)}\n"],
    ],
}

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(loader, **options):
        return loader


# %% made-up reviews: some words are good, some are bad
random.seed(7)
WORDS = ["".join(random.choices("aeioulnrst", k=random.randint(4, 9))) for _ in range(6000)]
GOOD, BAD = set(WORDS[0::9]), set(WORDS[1::9])


def review():
    label = random.randint(0, 1)
    mood = WORDS[1 - label :: 9]
    words = [random.choice(mood) if random.random() < 0.15 else random.choice(WORDS) for _ in range(100)]
    return " ".join(words), label


reviews = [review() for _ in range(1600)]
counts = Counter(w for text, _ in reviews for w in text.split())
vocab = ["<pad>", *[w for w, _ in counts.most_common(4000)]]
known = set(vocab)


# %%
class ReviewDataset(Dataset):
    def __init__(self, reviews, vocab):
        self.reviews = reviews
        self.vocab = vocab

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, idx):
        text, label = self.reviews[idx]
        words = [w for w in text.split() if w in known]
        ids = [self.vocab.index(w) for w in words]
        ids = ids + [0] * (100 - len(ids))
        return torch.tensor(ids), torch.tensor(label)


class SentimentNet(nn.Module):
    def __init__(self, vocab_size, embed_dim=128):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=0)
        self.conv = nn.Conv1d(embed_dim, 128, 5, padding=2)
        self.fc = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        h = torch.relu(self.conv(self.embedding(x).transpose(1, 2)))
        return self.fc(h.amax(2))


# %%
torch.manual_seed(7)
train_loader = DataLoader(ReviewDataset(reviews, vocab), batch_size=32, shuffle=True)
model = SentimentNet(len(vocab))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(1, 4):
    epoch_loss, epoch_acc = 0.0, 0.0
    for x, y in tqdm(train_loader, desc=f"epoch {epoch}", disable=None):
        optimizer.zero_grad()
        pred = model(x)
        loss = criterion(pred, y)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
        epoch_acc += (pred.argmax(1) == y).float().mean().item()
    print(f"epoch {epoch}: loss {epoch_loss / len(train_loader):.3f} acc {epoch_acc / len(train_loader):.3f}")
