"""Fine-tuning of a body that was trained before: early layers hardly move, the new head learns fast."""

import argparse
import logging

import torch
from torch import nn

CASE = {
    "generation": 13,
    "truth": "Early layers have a thousandth of the head's learning rate on purpose, the stem is frozen in evaluation mode, and each layer's rate falls by a cosine: usual for fine-tuning. Convolutions take the time.",
    "cause": None,
    "also": [],
    "never": [
        "learning-rate-too-small",
        "no-update",
        "unused-gradients",
        "wrong-mode",
        "data-loading",
        "logging",
        "host-python",
    ],
    "healthy": True,
}

LOG = logging.getLogger(__name__)


def block(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1)
    )


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.early, self.late = block(24, 48), block(48, 64)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, classes))

    def train(self, mode=True):
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            x = self.stem(x)
        return self.head(self.late(torch.relu(self.early(x))))


def pretrained(state):
    """Return the network with the body of another task, which stands for a download."""
    net = Net(classes=10)
    net.load_state_dict(state)
    net.head[-1] = nn.Linear(64, 4)
    net.stem.requires_grad_(False)
    return net


def leaves(count):
    kind = torch.randint(4, (count,))
    wave = torch.linspace(0, 12.56, 40)
    edge = torch.sin(wave * (kind.view(-1, 1) + 1) / 2).unsqueeze(1) * torch.cos(wave).view(1, -1, 1)
    return edge.unsqueeze(1) * torch.rand(count, 3, 1, 1) + 0.3 * torch.randn(count, 3, 40, 40), kind


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--head-lr", type=float, default=3e-3)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    torch.manual_seed(6)
    net = pretrained(Net(classes=10).state_dict())
    x, y = leaves(960)
    groups = [(net.early, 1e-3), (net.late, 1e-1), (net.head, 1.0)]
    optimizer = torch.optim.AdamW([{"params": m.parameters(), "lr": options.head_lr * f} for m, f in groups])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for epoch in range(options.epochs):
        net.train()
        total = torch.zeros(())
        for rows in torch.randperm(len(x)).split(32):
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        schedule.step()
        LOG.info("epoch %d: loss %.3f, rates %s", epoch, total / 30, ["%.1e" % r for r in schedule.get_last_lr()])


if __name__ == "__main__":
    main()
