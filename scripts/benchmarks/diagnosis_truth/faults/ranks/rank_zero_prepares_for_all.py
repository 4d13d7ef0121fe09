"""Data parallelism in which the first rank owns the data and hands each rank its part of the batch."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 4,
    "truth": "Rank 0 alone builds all batches in plain Python and scatters them: rank 1 waits for it in each step.",
    "cause": "straggler",
    "also": ["data-loading", "host-python"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-buckets", "exposed-communication"],
    "healthy": False,
    "ranks": 2,
    "place": [
        "self.source.example()",
        "parts = [",
        "self.scatter(",
        "dist.scatter(",
        "answer = ",
        "question = ",
        "tokens += ",
        "while len(tokens)",
        "def example",
        "for step, tokens in enumerate(feeder)",
        "examples = ",
    ],
    "share": 52,
    "remedy": "let each rank build its own part of the batch",
    "without": [
        [
            "            examples = [self.source.example() for _ in range(self.size * self.world)]\n",
            "            examples = self.kept = getattr(self, 'kept', None) or [self.source.example() for _ in range(self.size * self.world)]\n",
        ]
    ],
}

DIGITS = {c: i + 1 for i, c in enumerate("0123456789+*-=() ")}


class Arithmetic:
    """Random expressions with their value, as characters."""

    def __init__(self, seed, length=64):
        self.rng, self.length = random.Random(seed), length

    def expression(self, depth):
        if depth == 0 or self.rng.random() < 0.2:
            return str(self.rng.randint(0, 20))
        left, right = self.expression(depth - 1), self.expression(depth - 1)
        return f"({left} {self.rng.choice('+*-')} {right})"

    def example(self):
        """Expressions one after the other, until the row is full."""
        tokens = []
        while len(tokens) < self.length:
            question = self.expression(3)
            answer = eval(question)
            if not 0 <= answer < 200:
                continue
            tokens += [DIGITS[c] for c in f"{question} = {answer} "]
        return tokens[: self.length]


class Feeder:
    def __init__(self, source, size, steps):
        self.source, self.size, self.steps = source, size, steps
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def scatter(self):
        mine = torch.empty(self.size, self.source.length, dtype=torch.long)
        parts = None
        if self.rank == 0:
            examples = [self.source.example() for _ in range(self.size * self.world)]
            parts = list(torch.tensor(examples).chunk(self.world))
        dist.scatter(mine, parts, src=0)
        return mine

    def __iter__(self):
        for _ in range(self.steps):
            yield self.scatter()


class CharModel(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(len(DIGITS) + 1, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, len(DIGITS) + 1)

    def forward(self, tokens):
        return self.head(self.rnn(self.emb(tokens))[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(CharModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    feeder = Feeder(Arithmetic(seed=0), size=128, steps=45)
    for step, tokens in enumerate(feeder):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0 and dist.get_rank() == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
