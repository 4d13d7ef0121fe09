"""A trainer class that validates after every sixth step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "truth": "validate() runs over 60 batches after every sixth step and takes 70% of the time.",
    "cause": "evaluation",
    "also": ["periodic-pause", "data-loading"],
    "never": ["start-up", "small-operators"],
    "healthy": False,
}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU()
        )
        self.fc = nn.Linear(16 * 12 * 12, 10)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


class Trainer:
    def __init__(self, model, train_loader, val_loader, val_every=6):
        self.model, self.train_loader, self.val_loader = model, train_loader, val_loader
        self.val_every = val_every
        self.opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()
        self.best = 0.0

    @torch.inference_mode()
    def validate(self):
        self.model.eval()
        right = total = 0
        for x, y in self.val_loader:
            right += (self.model(x).argmax(1) == y).sum().item()
            total += len(y)
        self.model.train()
        return right / total

    def fit(self, epochs):
        step = 0
        for _ in range(epochs):
            for x, y in self.train_loader:
                self.opt.zero_grad(set_to_none=True)
                self.criterion(self.model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                step += 1
                if step % self.val_every == 0:
                    self.best = max(self.best, self.validate())
        print("best", self.best)


def dataset(n):
    return TensorDataset(torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,)))


if __name__ == "__main__":
    torch.manual_seed(0)
    train, val = DataLoader(dataset(32 * 30), 32, shuffle=True), DataLoader(dataset(60 * 32), 32)
    Trainer(Classifier(), train, val).fit(1)
