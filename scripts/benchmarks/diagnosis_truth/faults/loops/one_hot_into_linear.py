"""Session-based recommender: a GRU reads the items that were clicked and predicts the category of the purchase."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 8,
    "truth": "Items enter as one-hot vectors of the whole catalogue and are multiplied by a Linear layer, instead of being looked up in an Embedding: products over thousands of zeros, and a dense gradient.",
    "cause": "dense-gradient",
    "also": ["slow-products"],
    "never": ["data-loading", "logging", "evaluation", "growth", "host-python", "start-up", "padding", "no-update"],
    "healthy": False,
    "place": ["F.one_hot(", "self.project(", "self.project = nn.Linear("],
    "share": 43,
    "remedy": "use nn.Embedding(catalogue, dim) and look the items up",
    "without": [
        [
            "        self.project = nn.Linear(catalogue, dim, bias=False)\n",
            "        self.project = nn.Embedding(catalogue, dim, sparse=True)\n",
        ],
        ["        clicks = F.one_hot(items, self.catalogue).float()\n", "        clicks = items\n"],
    ],
}


class SessionGRU(nn.Module):
    def __init__(self, catalogue, categories, dim=48, hidden=128):
        super().__init__()
        self.catalogue = catalogue
        self.project = nn.Linear(catalogue, dim, bias=False)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, categories))

    def forward(self, items):
        clicks = F.one_hot(items, self.catalogue).float()
        _, last = self.gru(self.project(clicks))
        return self.head(last[0])


def sessions(count, length, catalogue, categories):
    """Shoppers look at items of a few neighbouring shelves before they buy."""
    category = torch.randint(categories, (count,))
    shelf = catalogue // categories
    on_topic = category[:, None] * shelf + torch.randint(shelf, (count, length))
    stray = torch.randint(catalogue, (count, length))
    return torch.where(torch.rand(count, length) < 0.35, on_topic, stray), category


def main(batch=32, length=12, catalogue=3000, categories=50):
    torch.manual_seed(17)
    items, bought = sessions(3200, length, catalogue, categories)
    model = SessionGRU(catalogue, categories)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for epoch in range(3):
        hits, seen = 0, 0
        for pick in torch.randperm(len(items)).split(batch):
            logits = model(items[pick])
            loss = F.cross_entropy(logits, bought[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += (logits.topk(5).indices == bought[pick, None]).any(1).sum().item()
            seen += len(pick)
        print(f"epoch {epoch}: recall@5 {hits / seen:.3f}")


if __name__ == "__main__":
    main()
