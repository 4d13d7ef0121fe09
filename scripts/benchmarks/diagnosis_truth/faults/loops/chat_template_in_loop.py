"""Instruction tuning of a small decoder that renders and encodes conversations in the training loop."""

import re
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = {
    "generation": 2,
    "truth": "Each step renders its conversations and encodes them by merges in Python, which takes most of it.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "padding", "growth", "small-operators"],
    "healthy": False,
    "place": ["tokenizer(render(", "for pair in zip(symbols", "self._word(", "def _word", "tokens = self.tokens"],
    "share": 58,
    "remedy": "encode the conversations once before the training, or in workers of a data loader",
    "without": [
        [
            "        encoded = [tokenizer(render(chat))[:CONTEXT] for chat in chats]\n",
            "        encoded = [known[chat] for chat in chats]\n",
        ],
        [
            "for step in range(STEPS):\n",
            "known = {chat: tokenizer(render(chat))[:CONTEXT] for chat in CHATS}\n    for step in range(STEPS):\n",
        ],
    ],
}

CONTEXT, STEPS = 96, 40
SYLLABLES = "al be ga del ta le arn gra di ent des cen at ten ti on tra ns for mer op ti mi zer".split()
rng = torch.Generator().manual_seed(7)


def word():
    return "".join(SYLLABLES[i] for i in torch.randint(0, len(SYLLABLES), (4,), generator=rng).tolist())


WORDS = [word() for _ in range(300)]


def phrase(n):
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=rng).tolist())


CHATS = [(phrase(30), phrase(150)) for _ in range(200)]


def render(chat):
    return f"<|user|>\n{chat[0]}\n<|assistant|>\n{chat[1]}\n"


class Tokenizer:
    def __init__(self, corpus, merges=120):
        self.pattern = re.compile(r" ?\w+|[^\w\s]+|\s")
        words = Counter(w for text in corpus for w in self.pattern.findall(text))
        pieces = {w: list(w) for w in words}
        self.ranks = {}
        for rank in range(merges):
            pairs = Counter()
            for w, n in words.items():
                for pair in zip(pieces[w], pieces[w][1:]):
                    pairs[pair] += n
            if not pairs:
                break
            best = max(pairs, key=pairs.get)
            self.ranks[best] = rank
            pieces = {w: self._merge(p, best) for w, p in pieces.items()}
        alphabet = sorted({c for w in words for c in w} | {"".join(pair) for pair in self.ranks})
        self.ids = {piece: i + 1 for i, piece in enumerate(alphabet)}

    @staticmethod
    def _merge(symbols, pair):
        merged, i = [], 0
        while i < len(symbols):
            if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
                merged.append(symbols[i] + symbols[i + 1])
                i += 2
            else:
                merged.append(symbols[i])
                i += 1
        return merged

    def _word(self, word):
        symbols = list(word)
        while len(symbols) > 1:
            candidates = [pair for pair in zip(symbols, symbols[1:]) if pair in self.ranks]
            if not candidates:
                break
            symbols = self._merge(symbols, min(candidates, key=self.ranks.get))
        return symbols

    def __call__(self, text):
        return [self.ids[s] for word in self.pattern.findall(text) for s in self._word(word)]


class Decoder(nn.Module):
    def __init__(self, vocabulary, d=64):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(CONTEXT, d)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocabulary)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def main():
    torch.manual_seed(0)
    tokenizer = Tokenizer([render(chat) for chat in CHATS[:40]])
    model = Decoder(len(tokenizer.ids) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(STEPS):
        chats = [CHATS[(step * 8 + i) % len(CHATS)] for i in range(8)]
        encoded = [tokenizer(render(chat))[:CONTEXT] for chat in chats]
        ids = torch.zeros(8, CONTEXT, dtype=torch.long)
        for row, tokens in zip(ids, encoded):
            row[: len(tokens)] = torch.tensor(tokens)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
