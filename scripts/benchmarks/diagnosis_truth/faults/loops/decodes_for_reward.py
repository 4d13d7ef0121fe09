"""Self-critical training of a captioning model: the reward of a sampled caption over a greedy one's."""

import argparse
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "Each step decodes captions twice, word by word and without a cache, before its one forward with gradients.",
    "cause": "evaluation",
    "also": ["small-operators", "host-python", "duplicate-forward"],
    "never": ["start-up", "data-loading", "growth", "periodic-pause", "logging", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "self.decode(features",
        "logits = self.model(features, words)[:, -1]",
        "for _ in range(self.max_length)",
        "words = torch.cat([words, nxt]",
        "nxt = ",
        "x = self.decoder(",
        "return self.head(",
    ],
    "share": 87,
    "remedy": "keep keys and values of past words while decoding, or sample less often",
    "without": [
        [
            "        sampled, greedy = self.decode(features, sample=True), self.decode(features, sample=False)\n",
            "        sampled, greedy = references, references\n",
        ]
    ],
}


def bigrams(words):
    words = words.tolist()
    return Counter(zip(words, words[1:]))


def overlap(candidate, reference):
    """F1 of bigrams, as a cheap stand-in for CIDEr."""
    a, b = bigrams(candidate), bigrams(reference)
    common = sum((a & b).values())
    return 2 * common / max(1, sum(a.values()) + sum(b.values()))


class Captioner(nn.Module):
    def __init__(self, vocab=300, d=64, layers=2, n_features=49):
        super().__init__()
        self.project = nn.Linear(128, d)
        self.words = nn.Embedding(vocab, d)
        self.positions = nn.Embedding(64, d)
        layer = nn.TransformerDecoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, layers)
        self.head = nn.Linear(d, vocab)

    def forward(self, features, words):
        length = words.shape[1]
        x = self.words(words) + self.positions(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.decoder(x, self.project(features), tgt_mask=mask)
        return self.head(x)


class SelfCritical:
    def __init__(self, model, args):
        self.model, self.max_length = model, args.max_length
        self.optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    @torch.no_grad()
    def decode(self, features, sample):
        words = torch.zeros(len(features), 1, dtype=torch.long)
        for _ in range(self.max_length):
            logits = self.model(features, words)[:, -1]
            nxt = torch.multinomial(logits.softmax(-1), 1) if sample else logits.argmax(-1, keepdim=True)
            words = torch.cat([words, nxt], dim=1)
        return words

    def step(self, features, references):
        sampled, greedy = self.decode(features, sample=True), self.decode(features, sample=False)
        reward = torch.tensor([overlap(s, r) - overlap(g, r) for s, g, r in zip(sampled, greedy, references)])
        logp = F.log_softmax(self.model(features, sampled[:, :-1]), -1)
        logp = logp.gather(-1, sampled[:, 1:, None]).squeeze(-1)
        loss = -(reward[:, None] * logp).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return reward.mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-length", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-5)
    args = parser.parse_args()
    torch.manual_seed(0)
    trainer = SelfCritical(Captioner(), args)
    for i in range(args.steps):
        features = torch.randn(args.batch, 49, 128)
        references = torch.randint(0, 300, (args.batch, args.max_length + 1))
        reward = trainer.step(features, references)
        if i % 10 == 0:
            print(f"iter {i} advantage {reward:+.4f}")


if __name__ == "__main__":
    main()
