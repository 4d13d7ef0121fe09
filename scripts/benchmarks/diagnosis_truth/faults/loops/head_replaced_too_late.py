"""Transfer learning: a small residual network, trained on shapes before, learns the kinds of flowers of a garden."""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim

CASE = {
    "generation": 13,
    "truth": "model.fc is replaced by a layer for the new classes after the optimizer was made, which still holds the old one: the new head stays as random as it began, and only the rest of the network learns.",
    "cause": "unused-gradients",
    "also": ["no-update"],
    "never": ["data-loading", "evaluation", "growth", "host-python", "small-operators", "logging", "start-up"],
    "healthy": False,
    "place": ["model.fc = nn.Linear", "optimizer = optim.SGD("],
    "remedy": "replace the head first, then make the optimizer of the model's parameters",
    "without": [
        ["    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)\n", ""],
        [
            "    model.fc = nn.Linear(model.fc.in_features, args.classes)\n",
            "    model.fc = nn.Linear(model.fc.in_features, args.classes)\n    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)\n",
        ],
    ],
}


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Conv2d(inplanes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, num_classes=20):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU())
        self.layers = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 64, 2), BasicBlock(64, 96, 2))
        self.fc = nn.Linear(96, num_classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def flowers(count, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    angle, radius = torch.atan2(y, x), (x**2 + y**2).sqrt()
    petals = torch.cos(angle * (labels.view(-1, 1, 1) + 2)) * (radius < 0.8)
    colours = torch.rand(count, 3, 1, 1, generator=generator)
    return petals.unsqueeze(1) * colours + 0.2 * torch.randn(count, 3, 32, 32, generator=generator), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = ResNet(num_classes=20)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model.fc = nn.Linear(model.fc.in_features, args.classes)
    images, labels = flowers(960, args.classes, seed=1)
    for epoch in range(args.epochs):
        model.train()
        running_loss, running_corrects = 0.0, 0
        for picked in torch.randperm(len(images)).split(args.batch_size):
            inputs, targets = images[picked], labels[picked]
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * inputs.size(0)
            running_corrects += (outputs.argmax(1) == targets).sum().item()
        print(f"epoch {epoch}: loss {running_loss / 960:.4f} acc {running_corrects / 960:.4f}")


if __name__ == "__main__":
    main()
