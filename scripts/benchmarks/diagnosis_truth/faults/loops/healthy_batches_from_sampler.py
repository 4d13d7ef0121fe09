"""Prices of flats from a table in memory; a DataLoader fetches whole batches by a BatchSampler."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

CASE = {
    "generation": 14,
    "truth": "A DataLoader without workers serves a table in memory, but it asks for whole batches of rows at once, so that loading takes little next to the wide network.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "small-operators", "evaluation", "logging", "growth"],
    "healthy": True,
}


class Flats(Dataset):
    def __init__(self, rows, columns=40):
        self.numbers = torch.randn(rows, columns)
        self.district = torch.randint(60, (rows,))
        base = torch.randn(60)[self.district]
        self.price = base + self.numbers[:, 0] * self.numbers[:, 1] + 0.1 * torch.randn(rows)

    def __len__(self):
        return len(self.price)

    def __getitem__(self, rows):
        rows = torch.as_tensor(rows)
        return self.numbers[rows], self.district[rows], self.price[rows]


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.district = nn.Embedding(60, 24)
        self.body = nn.Sequential(
            nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU()
        )
        self.price = nn.Linear(512, 1)

    def forward(self, numbers, district):
        return self.price(self.body(torch.cat([numbers, self.district(district)], 1))).squeeze(1)


def main():
    torch.manual_seed(23)
    flats = Flats(20_480)
    sampler = BatchSampler(RandomSampler(flats), batch_size=1024, drop_last=True)
    loader = DataLoader(flats, sampler=sampler, batch_size=None)
    model = Prices()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(4):
        total = torch.zeros(())
        for numbers, district, price in loader:
            loss = nn.functional.huber_loss(model(numbers, district), price)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: {total.item() / len(loader):.4f}")


if __name__ == "__main__":
    main()
