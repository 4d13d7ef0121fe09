"""Compressed images, decoded one by one in __getitem__."""

import argparse
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "truth": "Decompressing and normalising each image in __getitem__ (num_workers=0) takes most of each step.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators"],
    "healthy": False,
}


class Images(Dataset):
    def __init__(self, n, size):
        rng = np.random.default_rng(0)
        self.size = size
        self.blobs = [zlib.compress(rng.integers(0, 12, (size, size, 3), dtype=np.uint8).tobytes()) for _ in range(n)]

    def __len__(self):
        return len(self.blobs) * 8

    def __getitem__(self, i):
        raw = np.frombuffer(zlib.decompress(self.blobs[i % len(self.blobs)]), np.uint8).reshape(self.size, self.size, 3)
        image = (raw.astype(np.float64) - 127.5) / 127.5
        image = np.flip(image, 1)[:: self.size // 32, :: self.size // 32]
        return torch.tensor(image.copy(), dtype=torch.float32).permute(2, 0, 1), i % 10


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=1)
    args = ap.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Images(72, 160), batch_size=args.batch_size, shuffle=True)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    net(torch.zeros(1, 3, 32, 32))
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    crit = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        for images, labels in loader:
            opt.zero_grad()
            loss = crit(net(images), labels)
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
