"""A trainer class for images, with a loader that costs little."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "truth": "A convolutional network in a trainer class, with a cheap loader; the convolutions take the time.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "evaluation", "checkpoint-writing"],
    "healthy": True,
}


class Trainer:
    def __init__(self, model, lr, clip):
        self.model, self.clip = model, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 20)
        self.criterion = nn.CrossEntropyLoss()

    def run_epoch(self, loader):
        running = 0.0
        for x, y in loader:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.criterion(self.model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.scheduler.step()
            running += loss.item()
        return running / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )
    model(torch.zeros(1, 3, 32, 32))
    data = TensorDataset(torch.randn(16 * 40, 3, 32, 32), torch.randint(0, 10, (16 * 40,)))
    print(Trainer(model, options.lr, options.clip).run_epoch(DataLoader(data, 16, shuffle=True)))


if __name__ == "__main__":
    main()
