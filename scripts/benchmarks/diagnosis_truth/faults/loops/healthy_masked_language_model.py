"""Masked language model of a made-up language: a small transformer guesses one token in seven that was hidden."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 9,
    "truth": "Only the 15 in 100 hidden positions reach the head and the loss, so the number of targets differs from step to step and most outputs have no gradient of their own: that is how masked language models are trained. Matrix products and attention take the time.",
    "cause": None,
    "also": ["unfused-optimizer"],
    "never": [
        "padding", "logits", "unused-gradients", "no-update", "recompilation", "host-python", "data-loading",
        "growth", "logging", "evaluation", "dense-gradient", "index-backward",
    ],
    "healthy": True,
}  # fmt: skip

MASK, FIRST = 0, 1


class Language:
    """Words of one topic follow one another in a fixed order more often than not."""

    def __init__(self, words=60, topics=2):
        self.words, self.topics = words, topics
        self.next_word = torch.stack([torch.randperm(words) for _ in range(topics)])

    def sentences(self, count, length):
        topic = torch.randint(self.topics, (count,))
        words = [torch.randint(self.words, (count,))]
        for _ in range(length - 1):
            follow = self.next_word[topic, words[-1]]
            words.append(torch.where(torch.rand(count) < 0.95, follow, torch.randint(self.words, (count,))))
        return torch.stack(words, 1) + FIRST


class Encoder(nn.Module):
    def __init__(self, tokens, length, dim=96, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(tokens, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, tokens))

    def forward(self, tokens, wanted):
        h = self.layers(self.token(tokens) + self.position)
        return self.head(h[wanted])


def hide(sentence, words, share=0.15):
    """Mask 80 in 100 of the chosen tokens, replace 10 and keep 10."""
    chosen = torch.rand(sentence.shape) < share
    dice = torch.rand(sentence.shape)
    shown = torch.where(chosen & (dice < 0.8), torch.full_like(sentence, MASK), sentence)
    other = torch.randint(FIRST, words + FIRST, sentence.shape)
    return torch.where(chosen & (dice > 0.9), other, shown), chosen


def train(steps=200, batch=16, length=24):
    torch.manual_seed(16)
    language = Language()
    corpus = language.sentences(3000, length)
    model = Encoder(language.words + FIRST, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        sentence = corpus[torch.randint(len(corpus), (batch,))]
        shown, chosen = hide(sentence, language.words)
        loss = F.cross_entropy(model(shown, chosen), sentence[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    train()
