"""Small images, kept after decoding in a dictionary that several processes may share."""

import argparse
import multiprocessing as mp
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 4,
    "truth": "Decoded images are kept in a Manager().dict(): each item is pickled and sent through a socket by another process.",
    "cause": "data-loading",
    "also": ["host-python", "start-up"],
    "never": ["evaluation", "growth", "small-operators", "logging", "garbage-collection"],
    "healthy": False,
    "place": [
        "if index not in self.cache",
        "self.cache[index] = self.decode(index)",
        "image, label = self.cache[index]",
        "for images, labels in loader",
    ],
    "share": 39,
    "remedy": "keep the images in a tensor in shared memory, or in a memory-mapped file",
    "without": [["    cache = manager.dict()\n", "    cache = {}\n"]],
}


class CachedImages(Dataset):
    def __init__(self, n, cache, size=32):
        self.n, self.cache, self.size = n, cache, size

    def __len__(self):
        return self.n

    def decode(self, index):
        rng = np.random.default_rng(index)
        label = int(rng.integers(10))
        image = rng.normal(label / 10, 1.0, size=(3, self.size, self.size)).astype(np.float32)
        return image, label

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = self.decode(index)
        image, label = self.cache[index]
        if np.random.rand() < 0.5:
            image = image[:, :, ::-1]
        return torch.from_numpy(np.ascontiguousarray(image)), label


class SmallNet(nn.Module):
    def __init__(self, channels=(12, 24), n_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels[0], 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.conv2 = nn.Conv2d(channels[0], channels[1], 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(channels[1])
        self.fc = nn.Linear(channels[1], n_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean(dim=(2, 3)))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100


def main():
    parser = argparse.ArgumentParser(description="train on cached images")
    parser.add_argument("-b", "--batch-size", default=64, type=int)
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("-j", "--workers", default=0, type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    manager = mp.Manager()
    cache = manager.dict()
    dataset = CachedImages(1600, cache)
    loader = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=args.workers, drop_last=True)
    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        started, top1 = time.time(), 0.0
        for images, labels in loader:
            output = model(images)
            loss = criterion(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            top1 += accuracy(output, labels)
        print(f"Epoch {epoch}\tAcc@1 {top1 / len(loader):.2f}\tTime {time.time() - started:.1f}s")


if __name__ == "__main__":
    main()
