"""Two towers for recommendation: customers and products, with the other products of a batch as negatives."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "The scores pair each customer with all products of the batch on purpose, the embedding tables have sparse gradients and an optimizer of their own, and products of the towers take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "broadcast-loss",
        "dense-gradient",
        "index-backward",
        "duplicate-forward",
        "logits",
        "data-loading",
        "host-python",
        "growth",
        "lost-state",
    ],
    "healthy": True,
}

CUSTOMERS, PRODUCTS, TASTES = 20000, 8000, 40


class Purchases:
    """Customers buy products of their taste; products have a price that the tower sees too."""

    def __init__(self, count=120000):
        self.customer = torch.randint(CUSTOMERS, (count,))
        taste = torch.where(torch.rand(count) < 0.8, self.customer % TASTES, torch.randint(TASTES, (count,)))
        self.product = taste + TASTES * torch.randint(PRODUCTS // TASTES, (count,))
        self.about_customers = torch.randn(CUSTOMERS, 16)
        self.about_customers[:, 0] += torch.arange(CUSTOMERS) % TASTES / 10
        self.about_products = torch.randn(PRODUCTS, 16)
        self.about_products[:, 0] += torch.arange(PRODUCTS) % TASTES / 10

    def sample(self, size):
        pick = torch.randint(len(self.customer), (size,))
        customer, product = self.customer[pick], self.product[pick]
        return customer, self.about_customers[customer], product, self.about_products[product]


class Tower(nn.Module):
    def __init__(self, count, known=16, dim=64, width=384):
        super().__init__()
        self.table = nn.Embedding(count, dim, sparse=True)
        nn.init.normal_(self.table.weight, std=0.1)
        self.layers = nn.Sequential(
            nn.Linear(dim + known, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64)
        )

    def forward(self, number, about):
        return F.normalize(self.layers(torch.cat([self.table(number), about], 1)), dim=1)


class TwoTowers(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.customers, self.products = Tower(CUSTOMERS), Tower(PRODUCTS)
        self.temperature = temperature

    def forward(self, customer, about_customer, product, about_product):
        left = self.customers(customer, about_customer)
        right = self.products(product, about_product)
        scores = left @ right.T / self.temperature
        same = product[:, None] == product[None, :]
        same.fill_diagonal_(False)
        return scores.masked_fill(same, -1e4)


def main(steps=160, size=512):
    torch.manual_seed(24)
    purchases, model = Purchases(), TwoTowers()
    tables = [model.customers.table.weight, model.products.table.weight]
    layers = [*model.customers.layers.parameters(), *model.products.layers.parameters()]
    optimizers = [torch.optim.SparseAdam(tables, lr=5e-3), torch.optim.Adam(layers, lr=1e-3, fused=True)]
    own = torch.arange(size)
    for step in range(1, steps + 1):
        scores = model(*purchases.sample(size))
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 40 == 0:
            rank = (scores > scores.diagonal()[:, None]).sum(1).float().mean().item()
            print(f"step {step}: loss {loss.item():.4f}, mean rank {rank:.1f} of {size}")


if __name__ == "__main__":
    main()
