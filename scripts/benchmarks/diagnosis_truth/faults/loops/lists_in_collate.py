"""Spectrograms classified by a convolutional network; the collate function makes tensors of lists."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 3,
    "truth": "The collate function turns each array into nested lists and makes a tensor of them: most of the loop.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators", "growth", "periodic-pause", "padding", "logging"],
    "healthy": False,
    "place": [".tolist() for", "torch.tensor(columns", "in loader", "torch.tensor(["],
    "share": 84,
    "remedy": "np.stack the arrays and use torch.from_numpy",
    "without": [["torch.tensor([s.tolist() for s in columns])", "torch.from_numpy(np.stack(columns))"]],
}


class Spectrograms(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(5)
        self.labels = rng.integers(0, 8, count)
        self.data = rng.standard_normal((count, 64, 64), dtype=np.float32)
        self.data[np.arange(count), self.labels * 7] += 1.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.data[i], int(self.labels[i])


def collate(samples):
    columns, labels = zip(*samples, strict=True)
    return torch.tensor([s.tolist() for s in columns]).unsqueeze(1), torch.tensor(labels)


class AudioNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveMaxPool2d(3)
        )
        self.classify = nn.Linear(144, 8)

    def forward(self, x):
        return self.classify(self.features(x).flatten(1))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Spectrograms(640), batch_size=32, shuffle=True, collate_fn=collate)
    net = AudioNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(1, 5):
        total, right = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            out = net(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            right += (out.argmax(1) == y).sum().item()
        print(f"epoch {epoch}: loss {total / 640:.3f} accuracy {right / 640:.2%}")


if __name__ == "__main__":
    main()
