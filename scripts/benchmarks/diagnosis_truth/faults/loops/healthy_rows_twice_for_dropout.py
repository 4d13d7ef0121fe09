"""Intents of spoken requests: each request goes through the network twice, with another dropout, and both answers must agree."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Each row stands in the batch twice on purpose, as dropout before the first layer makes the two passes differ and the loss compares them; products take the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "index-backward",
        "needless-copies",
        "unused-outputs",
        "wrong-mode",
        "padding",
        "double-softmax",
        "data-loading",
        "growth",
        "cut-gradients",
    ],
    "healthy": True,
}

WORDS, INTENTS, LENGTH = 1500, 20, 24


def requests(count):
    """Return words of requests, of which a few belong to the intent."""
    intents = torch.randint(INTENTS, (count,))
    words = torch.randint(INTENTS * 20, WORDS, (count, LENGTH))
    own = intents[:, None] * 20 + torch.randint(20, (count, LENGTH))
    return torch.where(torch.rand(count, LENGTH) < 0.2, own, words), intents


class Classifier(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, width, mode="mean", sparse=False)
        self.tokens = nn.Embedding(WORDS, width)
        self.drop = nn.Dropout(0.2)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(2 * width, INTENTS)

    def forward(self, words):
        hidden = self.body(self.drop(self.tokens(words))).mean(1)
        return self.head(torch.cat([hidden, self.drop(self.words(words))], 1))


def agreement(one, two):
    """Return how far two answers are from each other, in both directions."""
    one, two = one.log_softmax(1), two.log_softmax(1)
    there = F.kl_div(one, two, reduction="batchmean", log_target=True)
    back = F.kl_div(two, one, reduction="batchmean", log_target=True)
    return (there + back) / 2


def main(steps=45, batch=16, weight=1.0):
    torch.manual_seed(78)
    words, intents = requests(3000)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(1, steps + 1):
        pick = torch.randint(len(words), (batch,))
        scores = model(words[pick].repeat(2, 1))
        loss = F.cross_entropy(scores, intents[pick].repeat(2)) + weight * agreement(*scores.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
