"""Short epochs, with a data loader made for each of them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 7,
    "truth": "Each epoch has four steps and makes a new data loader, whose two workers are started anew.",
    "cause": "data-loading",
    "also": ["periodic-pause"],
    "never": ["start-up", "evaluation", "growth", "small-operators", "logging"],
    "healthy": False,
    "place": ["for x, y in loader", "loader = DataLoader("],
    "share": 87,
    "remedy": "make the loader once, with persistent workers",
    "without": [
        [
            "    for _ in range(epochs):\n        loader = DataLoader(data, batch_size=48, shuffle=True, num_workers=2)\n",
            "    loader = DataLoader(data, batch_size=48, shuffle=True, num_workers=2, persistent_workers=True)\n"
            "    for _ in range(epochs):\n",
        ]
    ],
}


def main(epochs=16):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(192, 64), torch.randint(10, (192,)))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(epochs):
        loader = DataLoader(data, batch_size=48, shuffle=True, num_workers=2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
