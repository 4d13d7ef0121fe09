"""Taxi fares from pick-up and drop-off records: a small network with embeddings for hour, weekday and zone."""

import random
from datetime import datetime, timedelta

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

CASE = {
    "generation": 11,
    "truth": "The collate function parses two date strings per record with strptime, for each record in each epoch again, where the table could be parsed once before the training.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": [
        "logging",
        "evaluation",
        "growth",
        "small-operators",
        "no-update",
        "start-up",
        "dense-gradient",
        "padding",
    ],
    "healthy": False,
    "place": ["datetime.strptime(", "moments(", "for numbers, codes, fare in loader"],
    "share": 46,
    "remedy": "parse the dates once, into columns of tensors",
    "without": [
        [
            '    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S")\n',
            "    return PARSED[text]\n",
        ],
        [
            "    trips = records(6000)\n",
            "    trips = records(6000)\n"
            '    PARSED.update((t[k], datetime.strptime(t[k], "%Y-%m-%d %H:%M:%S")) for t in trips for k in ("pickup", "dropoff"))\n',
        ],
        ["ZONES = 60\n", "ZONES = 60\nPARSED = {}\n"],
    ],
}

ZONES = 60


def records(count):
    """Rows as the export of the meter has them."""
    start = datetime(2023, 1, 1)
    rows = []
    for _ in range(count):
        pickup = start + timedelta(seconds=random.randrange(365 * 86400))
        miles = random.expovariate(0.3) + 0.3
        pace = 150 + 200 * (7 <= pickup.hour <= 19) * (pickup.weekday() < 5)
        dropoff = pickup + timedelta(seconds=int(miles * pace * random.uniform(0.8, 1.2)))
        rows.append({
            "pickup": str(pickup), "dropoff": str(dropoff), "miles": miles,
            "from": random.randrange(ZONES), "to": random.randrange(ZONES), "riders": random.randint(1, 4),
            "fare": 3 + 1.75 * miles + 0.008 * (dropoff - pickup).seconds + 2.5 * (pickup.hour >= 20),
        })  # fmt: skip
    return rows


def moments(text):
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S")


def collate(trips):
    numbers, codes, fares = [], [], []
    for trip in trips:
        begin, end = moments(trip["pickup"]), moments(trip["dropoff"])
        numbers.append((trip["miles"], (end - begin).seconds / 600, trip["riders"]))
        codes.append((begin.hour, begin.weekday(), trip["from"], trip["to"]))
        fares.append(trip["fare"])
    return torch.tensor(numbers), torch.tensor(codes), torch.tensor(fares)


class FareNet(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, 12) for n in (24, 7, ZONES, ZONES)])
        self.net = nn.Sequential(
            nn.Linear(3 + 48, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, numbers, codes):
        looked_up = [table(codes[:, i]) for i, table in enumerate(self.tables)]
        return self.net(torch.cat([numbers, *looked_up], 1)).squeeze(1)


def main(epochs=6, batch=300):
    random.seed(5)
    torch.manual_seed(5)
    trips = records(6000)
    loader = DataLoader(trips, batch_size=batch, shuffle=True, collate_fn=collate)
    model = FareNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        total = 0.0
        for numbers, codes, fare in loader:
            loss = F.smooth_l1_loss(model(numbers, codes), fare)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")


if __name__ == "__main__":
    main()
