"""Word vectors of a small corpus by skip-gram with negative samples."""

import random
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "For each pair of words random.choices draws the negatives from a list of weights, and adds up all 6000 weights again to do so: 74% of the loop's time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "padding", "broadcast-loss"],
    "healthy": False,
    "place": [
        "return random.choices(self.words, weights=self.weights, k=self.negatives)",
        "others = [self.draw() for _ in pairs]",
        "for step, (middle, near, others) in enumerate(corpus.batches(size), 1):",
    ],
    "share": 74,
    "remedy": "add the weights up once and give them as cum_weights, or draw a whole batch with torch.multinomial",
    "without": [
        [
            "return random.choices(self.words, weights=self.weights, k=self.negatives)",
            "return random.choices(self.words, cum_weights=self.summed, k=self.negatives)",
        ],
        [
            "        self.negatives = negatives\n",
            "        self.negatives, self.summed, total = negatives, [], 0.0\n"
            "        for weight in self.weights:\n"
            "            total += weight\n"
            "            self.summed.append(total)\n",
        ],
    ],
}

VOCABULARY, TOPICS = 6000, 30


class Corpus:
    """Text whose words come from the topic of their paragraph, frequent words more often."""

    def __init__(self, length=40000, window=2, negatives=5):
        rng = random.Random(76)
        self.text = []
        while len(self.text) < length:
            topic = rng.randrange(TOPICS)
            self.text += [topic + TOPICS * int(VOCABULARY // TOPICS * rng.random() ** 2) for _ in range(40)]
        counts = Counter(self.text)
        self.words = list(range(VOCABULARY))
        self.weights = [counts[word] ** 0.75 for word in self.words]
        self.window = window
        self.negatives = negatives

    def draw(self):
        return random.choices(self.words, weights=self.weights, k=self.negatives)

    def batches(self, size):
        while True:
            pairs = []
            for _ in range(size):
                at = random.randrange(self.window, len(self.text) - self.window)
                by = random.choice([move for move in range(-self.window, self.window + 1) if move])
                pairs.append((self.text[at], self.text[at + by]))
            others = [self.draw() for _ in pairs]
            yield torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs]), torch.tensor(others)


class SkipGram(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.inputs = nn.Embedding(VOCABULARY, dim, sparse=True)
        self.outputs = nn.Embedding(VOCABULARY, dim, sparse=True)
        nn.init.uniform_(self.inputs.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.outputs.weight)

    def forward(self, middle, near, others):
        middle = self.inputs(middle)
        right = (middle * self.outputs(near)).sum(1)
        wrong = torch.einsum("bd,bkd->bk", middle, self.outputs(others))
        return -(F.logsigmoid(right) + F.logsigmoid(-wrong).sum(1)).mean()


def main(steps=100, size=128):
    torch.manual_seed(76)
    random.seed(76)
    corpus, model = Corpus(), SkipGram()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=3e-2)
    total = 0.0
    for step, (middle, near, others) in enumerate(corpus.batches(size), 1):
        loss = model(middle, near, others)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 25 == 0:
            print(f"step {step}: loss {total / 25:.4f}")
            total = 0.0
        if step == steps:
            break


if __name__ == "__main__":
    main()
