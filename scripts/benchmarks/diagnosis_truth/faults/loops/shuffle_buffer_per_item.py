"""A streamed data set with a shuffle buffer, feeding a small convolutional network."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

CASE = {
    "generation": 3,
    "truth": "The stream shuffles its whole buffer of 2,000 items for each item that it yields: nearly all of the time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators", "growth", "periodic-pause", "logging"],
    "healthy": False,
    "place": ["random.shuffle(buffer)", "enumerate(loader)", "yield buffer.pop()"],
    "share": 75,
    "remedy": "swap one random item of the buffer with the next one",
    "without": [
        [
            "                random.shuffle(buffer)\n                yield buffer.pop()\n",
            "                at = random.randrange(len(buffer))\n                buffer[at], buffer[-1] = buffer[-1], buffer[at]\n                yield buffer.pop()\n",
        ]
    ],
}


class Stream(IterableDataset):
    """Signals as they come from a sensor, by class one after another."""

    def __init__(self, count, length=256):
        self.count, self.length = count, length

    def read(self):
        generator = torch.Generator().manual_seed(3)
        for number in range(self.count):
            label = number * 5 // self.count
            yield torch.randn(1, self.length, generator=generator) + 0.2 * label, label

    def __iter__(self):
        buffer = []
        for item in self.read():
            buffer.append(item)
            if len(buffer) >= 2000:
                random.shuffle(buffer)
                yield buffer.pop()
        random.shuffle(buffer)
        yield from buffer


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv1d(1, 32, 7, stride=2, padding=3),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 64, 5, stride=2, padding=2),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(64, 5),
        )


def main():
    random.seed(0)
    torch.manual_seed(0)
    loader = DataLoader(Stream(5000), batch_size=64, num_workers=0)
    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for number, (signal, label) in enumerate(loader):
        loss = criterion(net(signal), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 19:
            print("batch", number + 1, "loss", float(loss))


if __name__ == "__main__":
    main()
