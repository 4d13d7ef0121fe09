"""Masked language modelling on text, with batches that a thread prepares ahead of time."""

import queue
import random
import threading

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "The thread that prepares batches splits and masks words in plain Python, several times as long as the step, which waits for its queue.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging", "garbage-collection"],
    "healthy": False,
    "place": [
        "self.queue.get()",
        "self.queue.put(corpus.batch(",
        "for tokens, labels in Prefetcher(",
        "def mask_tokens",
        "for i, word in enumerate(words)",
        "words = self.window(",
        "ids = self.encode(",
        "labels += ",
        "tokens += ",
        "piece = vocabulary.get(",
        "for end in range(",
        "while begin < len(word)",
        "found.append(piece)",
        "rows.append(self.mask_tokens(",
    ],
    "share": 69,
    "remedy": "prepare the batches in other processes, or mask by tensor operations",
    "without": [
        [
            "    for tokens, labels in Prefetcher(Corpus(args.vocabulary, 40_000), args.batch, args.length, args.steps):",
            "    for tokens, labels in [next(iter(Prefetcher(Corpus(args.vocabulary, 40_000), args.batch, args.length, 1)))] * args.steps:",
        ]
    ],
}


class Corpus:
    def __init__(self, size, n_words):
        rng = random.Random(0)
        letters = "aeinorst"
        pieces = ["".join(rng.choices(letters, k=rng.randint(2, 4))) for _ in range(size)]
        pieces = list(dict.fromkeys([*letters, *pieces]))
        self.vocabulary = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, **{w: i + 3 for i, w in enumerate(pieces)}}
        words = ["".join(rng.choices(letters, k=rng.randint(4, 11))) for _ in range(2000)]
        self.text = rng.choices(words, weights=[1 / (i + 1) for i in range(len(words))], k=n_words)

    def window(self, length, rng):
        start = rng.randrange(len(self.text) - length)
        return self.text[start : start + length]

    def encode(self, word):
        """Greedy longest match, as WordPiece does."""
        vocabulary, found, begin = self.vocabulary, [], 0
        while begin < len(word):
            for end in range(len(word), begin, -1):
                piece = vocabulary.get(word[begin:end])
                if piece is not None:
                    found.append(piece)
                    break
            begin = end
        return found

    def mask_tokens(self, words, rng):
        tokens, labels = [], []
        for i, word in enumerate(words):
            ids = self.encode(word.strip().lower())
            if rng.random() < 0.15:
                labels += ids
                tokens += [2] * len(ids)
            else:
                labels += [-100] * len(ids)
                tokens += ids
        return tokens[: len(words)], labels[: len(words)]

    def batch(self, size, length, rng):
        rows = []
        for _ in range(size):
            words = self.window(length, rng)
            rows.append(self.mask_tokens(words, rng))
        return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


class Prefetcher:
    """Iterator over batches from a daemon thread."""

    def __init__(self, corpus, batch, length, steps, depth=4):
        self.queue = queue.Queue(maxsize=depth)
        self.args = (corpus, batch, length, steps)
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()

    def fill(self):
        corpus, batch, length, steps = self.args
        rng = random.Random(1)
        for _ in range(steps):
            self.queue.put(corpus.batch(batch, length, rng))
        self.queue.put(None)

    def __iter__(self):
        while True:
            item = self.queue.get()
            if item is None:
                return
            yield item


class Bag(nn.Module):
    """Mixes neighbours by a convolution, which is enough for this corpus."""

    def __init__(self, size, d=32):
        super().__init__()
        self.emb = nn.Embedding(size, d)
        self.mix = nn.Conv1d(d, d, 3, padding=1, groups=d)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, size)

    def forward(self, tokens, where):
        h = self.emb(tokens)
        h = self.norm(h + self.mix(h.transpose(1, 2)).transpose(1, 2))
        return self.head(h[where])


class Args:
    vocabulary = 500
    batch = 48
    length = 80
    steps = 90
    lr = 2e-3


def main(args=Args):
    torch.manual_seed(0)
    model = Bag(args.vocabulary + 12)  # letters and special tokens
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step = 0
    for tokens, labels in Prefetcher(Corpus(args.vocabulary, 40_000), args.batch, args.length, args.steps):
        where = labels != -100
        loss = F.cross_entropy(model(tokens, where), labels[where])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        if step % 30 == 0:
            print(step, round(loss.item(), 3))


if __name__ == "__main__":
    main()
