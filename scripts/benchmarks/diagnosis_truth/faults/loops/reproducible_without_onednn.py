"""Image classification of small synthetic shapes with a residual network."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 8,
    "truth": "seed_everything switches oneDNN off (torch.backends.mkldnn.enabled = False) in the belief that results become reproducible, and all convolutions take the slow native path.",
    "cause": "slow-products",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "host-python",
        "small-operators",
        "start-up",
        "no-update",
    ],
    "healthy": False,
    "place": ["torch.backends.mkldnn.enabled = False", "seed_everything("],
    "share": 41,
    "remedy": "leave oneDNN on",
    "without": [["    torch.backends.mkldnn.enabled = False\n", ""]],
}


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.mkldnn.enabled = False


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.shortcut = nn.Sequential()
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, classes=4, widths=(16, 32, 64)):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        layers, cin = [], widths[0]
        for i, width in enumerate(widths):
            layers += [BasicBlock(cin, width, 1 if i == 0 else 2)]
            cin = width
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(cin, classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def shapes(count, side=32):
    """Discs, squares, crosses and rings of random place, size and colour."""
    axis = torch.arange(side) - side / 2
    x = axis[None, None, :] - torch.randint(-6, 7, (count, 1, 1))
    y = axis[None, :, None] - torch.randint(-6, 7, (count, 1, 1))
    r = torch.randint(4, 9, (count, 1, 1))
    d = (x**2 + y**2).sqrt()
    square = (x.abs() < r) & (y.abs() < r)
    kinds = torch.stack([d < r, square, ((x.abs() < 2) | (y.abs() < 2)) & square, (d < r) & (d > r - 3)]).float()
    label = torch.randint(4, (count,))
    mask = kinds[label, torch.arange(count)]
    return mask[:, None] * torch.randn(count, 3, 1, 1) + 0.3 * torch.randn(count, 3, side, side), label


def main():
    seed_everything(42)
    x, y = shapes(500)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for epoch in range(3):
        correct = 0
        for pick in torch.randperm(len(x)).split(10):
            logits = model(x[pick])
            loss = F.cross_entropy(logits, y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (logits.argmax(1) == y[pick]).sum().item()
        print(f"epoch {epoch}: accuracy {correct / len(x):.3f}, last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
