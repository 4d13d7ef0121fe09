"""Next item of a shopping session: a recurrent recommender, trained by a small Trainer."""

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "The head scores all 4000 items at each of the 25 positions of a session, and the loss reads the last position only: 24 of 25 rows of the largest product are thrown away.",
    "cause": "unused-outputs",
    "also": ["logits"],
    "never": ["data-loading", "host-python", "growth", "start-up", "logging", "no-update", "small-operators"],
    "healthy": False,
    "place": [
        "scores = self.head(self.drop(hidden))",
        "return self.criterion(scores[:, -1], target)",
        "scores = self.net(sessions)",
        "return scores",
    ],
    "share": 67,
    "remedy": "take the last position before the head: self.head(self.drop(hidden[:, -1:]))",
    "without": [["self.head(self.drop(hidden))", "self.head(self.drop(hidden[:, -1:]))"]],
}


class SessionNet(nn.Module):
    def __init__(self, items, width):
        super().__init__()
        self.items = nn.Embedding(items, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, items)

    def forward(self, sessions):
        hidden, _ = self.gru(self.items(sessions))
        scores = self.head(self.drop(hidden))
        return scores


class Trainer:
    def __init__(self, net, data, batch_size=16, lr=0.05):
        self.net, self.data, self.batch_size = net, data, batch_size
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr, fused=True)

    def compute_loss(self, sessions, target):
        scores = self.net(sessions)
        return self.criterion(scores[:, -1], target)

    def fit(self, epochs):
        for epoch in range(epochs):
            running, seen = torch.zeros(()), 0
            for rows in torch.randperm(len(self.data)).split(self.batch_size):
                batch = self.data[rows]
                loss = self.compute_loss(batch[:, :-1], batch[:, -1])
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                running, seen = running + loss.detach(), seen + 1
            print(f"epoch {epoch}: {running.item() / seen:.3f}")


def sessions(count, length, items):
    """Return sessions that walk through neighbouring items of the catalogue."""
    start = torch.randint(1, items, (count, 1))
    walk = torch.randint(1, 4, (count, length + 1)).cumsum(1)
    return (start + walk) % (items - 1) + 1


if __name__ == "__main__":
    torch.manual_seed(8)
    trainer = Trainer(SessionNet(items=4000, width=48), sessions(480, 25, 4000))
    trainer.fit(epochs=2)
