"""Bearing faults from vibration: a GRU over short windows of band energies, then a classifier."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 8,
    "truth": "The GRU lacks batch_first although its input is (batch, time, features): it walks over the 64 samples of the batch as if they were time steps, one small step after the other, and mixes samples.",
    "cause": "small-operators",
    "also": ["slow-products"],
    "never": ["data-loading", "logging", "evaluation", "growth", "host-python", "start-up", "padding", "no-update"],
    "healthy": False,
    "place": ["self.gru = nn.GRU(", "self.gru("],
    "share": 68,
    "remedy": "nn.GRU(..., batch_first=True)",
    "without": [
        [
            "nn.GRU(hidden, hidden, num_layers=1, bidirectional=True)",
            "nn.GRU(hidden, hidden, num_layers=1, bidirectional=True, batch_first=True)",
        ]
    ],
}


class BearingNet(nn.Module):
    def __init__(self, bands=32, hidden=48, classes=5):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(bands, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.gru = nn.GRU(hidden, hidden, num_layers=1, bidirectional=True)
        self.attention = nn.Linear(2 * hidden, 1)
        self.classifier = nn.Sequential(nn.Linear(2 * hidden, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, classes))

    def forward(self, x):
        states, _ = self.gru(self.embed(x))
        weight = torch.softmax(self.attention(states), dim=1)
        return self.classifier((weight * states).sum(1))


def vibrations(count, steps=10, bands=32, classes=5):
    """Each fault raises energy in its own bands with its own rhythm."""
    label = torch.randint(classes, (count,))
    t = torch.arange(steps)[None, :, None]
    band = torch.arange(bands)[None, None, :]
    centre = 4 + 6 * label[:, None, None]
    rhythm = torch.cos(6.2832 * t / (2 + label[:, None, None]))
    energy = torch.exp(-((band - centre) ** 2) / 8.0) * (1 + rhythm)
    return energy + 0.6 * torch.randn(count, steps, bands), label


def main():
    torch.manual_seed(29)
    train = TensorDataset(*vibrations(1600))
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = BearingNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(6):
        model.train()
        correct = total = 0
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            correct += (out.argmax(1) == y).sum().item()
            total += len(y)
        print(f"Epoch {epoch + 1}: loss {loss.item():.3f} acc {correct / total:.3f}")


if __name__ == "__main__":
    main()
