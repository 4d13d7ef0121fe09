"""Sections of a newspaper from the text of articles, with the names of persons masked, by a convolutional reader."""

import random
import re

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 9,
    "truth": "re.sub gets a pattern made of each person's name; there are more names than the 512 patterns that re keeps, so each one is compiled again for every article in every epoch.",
    "cause": "host-python",
    "also": ["data-loading"],
    "never": [
        "logging",
        "evaluation",
        "growth",
        "start-up",
        "no-update",
        "small-operators",
        "dense-gradient",
        "garbage-collection",
    ],
    "healthy": False,
    "place": ["text = re.sub(", "def anonymous("],
    "share": 40,
    "remedy": "compile the patterns once and keep them, or mask the names once when the articles are read",
    "without": [
        [
            '        text = re.sub(rf"\\b(?:(?:Mr|Mrs|Dr)\\.? )?{re.escape(name)}(?:\'s)?\\b", "PERSON", text)\n',
            '        text = compiled(rf"\\b(?:(?:Mr|Mrs|Dr)\\.? )?{re.escape(name)}(?:\'s)?\\b").sub("PERSON", text)\n',
        ],
        ["SYLLABLES = ", "compiled = __import__('functools').cache(re.compile)\nSYLLABLES = "],
    ],
}

SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu".split()
SECTIONS = ["politics", "sports", "science", "culture", "business"]


def word(dice, syllables):
    return "".join(dice.choice(SYLLABLES) for _ in range(syllables))


class Article:
    def __init__(self, text, people, section):
        self.text, self.people, self.section = text, people, section


def newspaper(count, length, dice):
    common = [word(dice, 2) for _ in range(250)]
    topical = [[word(dice, 3) for _ in range(60)] for _ in SECTIONS]
    people = list({f"{word(dice, 2).title()} {word(dice, 3).title()}" for _ in range(1500)})
    articles = []
    for _ in range(count):
        section = dice.randrange(len(SECTIONS))
        named = dice.sample(people, 6)
        words = [dice.choice(topical[section] if dice.random() < 0.15 else common) for _ in range(length)]
        for name in named:
            words[dice.randrange(length)] = dice.choice(["", "Dr. ", "Mrs "]) + name + dice.choice(["", "'s"])
        articles.append(Article(" ".join(words), named, section))
    return articles


def anonymous(article):
    text = article.text
    for name in article.people:
        text = re.sub(rf"\b(?:(?:Mr|Mrs|Dr)\.? )?{re.escape(name)}(?:'s)?\b", "PERSON", text)
    return text


def batches(articles, vocabulary, size, length, dice):
    order = list(articles)
    dice.shuffle(order)
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        rows = [[vocabulary.get(w, 1) for w in anonymous(a).split()[:length]] for a in chosen]
        rows = [row + [0] * (length - len(row)) for row in rows]
        yield torch.tensor(rows), torch.tensor([a.section for a in chosen])


class Reader(nn.Module):
    def __init__(self, words, sections, dim=48, width=48):
        super().__init__()
        self.embed = nn.Embedding(words, dim, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(dim, width, k, padding=k // 2) for k in (3, 5)])
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(2 * width, sections))

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        return self.head(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1))


def main(size=16, length=120, epochs=6):
    torch.manual_seed(3)
    dice = random.Random(3)
    articles = newspaper(480, length, dice)
    seen = sorted({w for a in articles for w in anonymous(a).split()})
    vocabulary = {w: i + 2 for i, w in enumerate(seen)}
    model = Reader(len(vocabulary) + 2, len(SECTIONS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        losses = []
        for tokens, section in batches(articles, vocabulary, size, length, dice):
            loss = F.cross_entropy(model(tokens), section)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
