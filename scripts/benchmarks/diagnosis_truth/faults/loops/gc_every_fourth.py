"""A trainer that collects garbage after every fourth step, with many Python objects in memory."""

import gc

import torch
from torch import nn

CASE = {
    "truth": "gc.collect() after every fourth step takes far longer than the four steps.",
    "cause": "garbage-collection",
    "also": ["periodic-pause", "host-python"],
    "never": ["start-up", "data-loading", "evaluation", "growth"],
    "healthy": False,
}


class Vocabulary:
    def __init__(self, n):
        self.words = {f"w{i}": {"id": i, "neighbours": [i + 1, i + 2], "forms": [[i]]} for i in range(n)}

    def batch(self, step, size):
        return torch.tensor([self.words[f"w{step * size + k}"]["neighbours"] for k in range(size)])


class Trainer:
    def __init__(self):
        self.vocabulary = Vocabulary(20_000)
        self.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)

    def train(self, steps):
        for step in range(1, steps + 1):
            x = self.vocabulary.batch(step, 128).float()
            loss = nn.functional.l1_loss(self.model(x), x)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 4 == 0:
                gc.collect()


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer().train(40)
