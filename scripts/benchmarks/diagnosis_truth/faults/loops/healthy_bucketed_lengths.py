"""Sentences in batches of similar length: a sampler sorts within pools, and batches have equal numbers of tokens."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

CASE = {
    "generation": 4,
    "truth": "Shapes differ from batch to batch, as they should; there is little padding, and products take the time.",
    "cause": None,
    "also": [],
    "never": ["padding", "periodic-pause", "data-loading", "host-python", "growth", "small-operators"],
    "healthy": True,
}


class Sentences(Dataset):
    def __init__(self, n, vocab=2000, seed=0):
        rng = random.Random(seed)
        self.items = []
        for _ in range(n):
            length = min(90, max(12, int(rng.lognormvariate(3.4, 0.5))))
            self.items.append(torch.tensor([rng.randrange(1, vocab) for _ in range(length)]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class TokenBatchSampler(Sampler):
    def __init__(self, lengths, max_tokens, pool=400, seed=0):
        self.lengths, self.max_tokens, self.pool, self.rng = lengths, max_tokens, pool, random.Random(seed)

    def __iter__(self):
        order = list(range(len(self.lengths)))
        self.rng.shuffle(order)
        batches = []
        for start in range(0, len(order), self.pool):
            batch, longest = [], 0
            for i in sorted(order[start : start + self.pool], key=self.lengths.__getitem__):
                longest = max(longest, self.lengths[i])
                if batch and longest * (len(batch) + 1) > self.max_tokens:
                    batches.append(batch)
                    batch, longest = [], self.lengths[i]
                batch.append(i)
            batches.append(batch)
        self.rng.shuffle(batches)
        return iter(batches)


def collate(items):
    tokens = pad_sequence(items, batch_first=True)
    return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab=2000, d=128, layers=3):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(128, d)
        self.blocks = nn.Sequential(*[Block(d, 4) for _ in range(layers)])
        self.head = nn.Linear(d, vocab)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


def main():
    torch.manual_seed(0)
    data = Sentences(1100)
    sampler = TokenBatchSampler([len(s) for s in data.items], max_tokens=1100)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = 0
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        tokens += int((y > 0).sum())
        if step % 15 == 0:
            print(f"step {step} tokens {tokens} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
