"""One epoch of training, then one validation and one checkpoint."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CASE = {
    "generation": 3,
    "truth": "The model validates and is saved once, after the only epoch; the steps before it are convolutions.",
    "cause": None,
    "also": [],
    "never": ["evaluation", "checkpoint-writing", "periodic-pause", "data-loading", "host-python"],
    "healthy": True,
}


def block(n_in, n_out):
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(), nn.MaxPool2d(2)
    )


def build(classes):
    return nn.Sequential(block(3, 32), block(32, 64), block(64, 64), nn.Flatten(), nn.Linear(64 * 16, classes))


def train_epoch(model, loader, criterion, optimizer, scheduler):
    model.train()
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def validate(model, loader, criterion):
    model.eval()
    loss = right = count = 0
    with torch.inference_mode():
        for x, y in loader:
            out = model(x)
            loss += criterion(out, y).item() * len(y)
            right += (out.argmax(1) == y).sum().item()
            count += len(y)
    return loss / count, right / count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(0, 10, (2400,))
    data = TensorDataset(torch.randn(2400, 3, 32, 32) + y.view(-1, 1, 1, 1) / 4, y)
    train, test = random_split(data, [1600, 800])
    model, criterion = build(10), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        train_epoch(model, loader, criterion, optimizer, scheduler)
        loss, accuracy = validate(model, DataLoader(test, 100), criterion)
        print(f"epoch {epoch}: validation loss {loss:.3f}, accuracy {accuracy:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")


if __name__ == "__main__":
    main()
