"""Topics of forum posts from their words, with early stopping on a running mean of the loss."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "Each step that lowers the running loss, so almost every one, makes a deep copy of the weights and of Adam's state: 47% of the loop's time.",
    "cause": "checkpoint-writing",
    "also": ["model-copies", "needless-copies"],
    "never": ["data-loading", "growth", "evaluation", "logging", "start-up", "small-operators", "dense-gradient"],
    "healthy": False,
    "place": [
        '"model": copy.deepcopy(model.state_dict()),',
        '"optimizer": copy.deepcopy(optimizer.state_dict()),',
        "stopper.update(loss.item(), model, optimizer)",
        "def update(self, loss, model, optimizer):",
    ],
    "share": 47,
    "remedy": "compare and copy once an epoch, into buffers that are kept, and copy only the weights",
    "without": [
        ["        stopper.update(loss.item(), model, optimizer)\n", ""],
        ["    return stopper.best\n", "    stopper.update(loss.item(), model, optimizer)\n    return stopper.best\n"],
    ],
}

WORDS, TOPICS = 6000, 12


class Posts:
    """Posts with words that partly depend on the topic; a post is a vector of logarithms of counts."""

    def __init__(self, count=1500, length=80):
        self.topics = torch.randint(TOPICS, (count,))
        general = (torch.rand(count, length) ** 3 * WORDS).long()
        special = self.topics[:, None] * 40 + torch.randint(40, (count, length)) + 3000
        self.words = torch.where(torch.rand(count, length) < 0.1, special, general)

    def batch(self, size):
        pick = torch.randint(len(self.topics), (size,))
        counts = torch.zeros(size, WORDS)
        counts.scatter_add_(1, self.words[pick], torch.ones(self.words[pick].shape))
        return counts.log1p(), self.topics[pick]


class EarlyStopping:
    def __init__(self, patience=30, decay=0.97):
        self.patience, self.decay = patience, decay
        self.running, self.lowest, self.waited = None, float("inf"), 0
        self.best = None

    def update(self, loss, model, optimizer):
        self.running = loss if self.running is None else self.decay * self.running + (1 - self.decay) * loss
        if self.running < self.lowest:
            self.lowest, self.waited = self.running, 0
            self.best = {
                "model": copy.deepcopy(model.state_dict()),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
                "loss": self.lowest,
            }
        else:
            self.waited += 1

    def should_stop(self):
        return self.waited > self.patience


class Classifier(nn.Module):
    def __init__(self, hidden=448):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WORDS, hidden), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, TOPICS),
        )  # fmt: skip

    def forward(self, words):
        return self.layers(words)


def train(steps=120, batch=48):
    posts, model, stopper = Posts(), Classifier(), EarlyStopping()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    for step in range(steps):
        words, topics = posts.batch(batch)
        loss = F.cross_entropy(model(words), topics)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stopper.update(loss.item(), model, optimizer)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        if stopper.should_stop():
            break
    return stopper.best


if __name__ == "__main__":
    torch.manual_seed(21)
    print(f"lowest running loss {train()['loss']:.3f}")
