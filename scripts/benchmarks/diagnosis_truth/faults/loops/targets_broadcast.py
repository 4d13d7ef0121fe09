"""House prices from tabular features with a residual MLP and embeddings for the categories."""

import torch
from torch import nn

CASE = {
    "generation": 8,
    "truth": "The prediction has shape (batch, 1) and the target (batch,): their difference is broadcast to a batch-by-batch matrix, so the loss is slow and trains the net towards the mean price.",
    "cause": "elementwise-chain",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "host-python",
        "small-operators",
        "no-update",
        "start-up",
    ],
    "healthy": False,
    "place": [
        "error = prediction - target",
        "huber(",
        "torch.where(error.abs()",
        "0.5 * error**2",
        "delta * (error.abs() - 0.5 * delta)",
    ],
    "share": 46,
    "remedy": "squeeze the prediction, so that both have shape (batch,)",
    "without": [["    error = prediction - target\n", "    error = prediction.squeeze(1) - target\n"]],
}


class Residual(nn.Module):
    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.net(x)


class TabularNet(nn.Module):
    def __init__(self, numeric=14, cardinalities=(30, 12, 6), width=96, depth=3):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, 8) for n in cardinalities])
        self.first = nn.Linear(numeric + 8 * len(cardinalities), width)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, numbers, categories):
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.head(self.blocks(self.first(torch.cat([numbers, *looked_up], 1))))


def huber(prediction, target, delta=1.0):
    error = prediction - target
    return torch.where(error.abs() < delta, 0.5 * error**2, delta * (error.abs() - 0.5 * delta)).mean()


def houses(count):
    numbers = torch.randn(count, 14)
    categories = torch.stack([torch.randint(n, (count,)) for n in (30, 12, 6)], 1)
    district = torch.randn(30)
    price = numbers @ torch.randn(14) / 3 + district[categories[:, 0]] + 0.5 * numbers[:, 0] * numbers[:, 1]
    return numbers, categories, price + 0.1 * torch.randn(count)


def main(batch=768, epochs=14):
    torch.manual_seed(13)
    numbers, categories, price = houses(9216)
    net = TabularNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-3)
    for epoch in range(epochs):
        net.train()
        total = 0.0
        for pick in torch.randperm(len(price)).split(batch):
            loss = huber(net(numbers[pick], categories[pick]), price[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(pick)
        print(f"epoch {epoch:2d}  huber {total / len(price):.4f}")


if __name__ == "__main__":
    main()
