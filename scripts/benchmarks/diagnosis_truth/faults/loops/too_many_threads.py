"""A convolutional network on the CPU with a number of threads that somebody copied from a large server."""

import argparse

import torch
from torch import nn

CASE = {
    "generation": 2,
    "truth": "torch.set_num_threads(8) on a machine with fewer cores: the threads wait for each other in every operator.",
    "cause": "thread-oversubscription",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "host-python", "growth", "garbage-collection", "logging"],
    "healthy": False,
    "place": ["torch.set_num_threads("],
    "share": 82,
    "remedy": "use no more threads than cores: leave set_num_threads out",
    "without": [["torch.set_num_threads(args.threads)", "torch.set_num_threads(1)"]],
}


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def build(width, depth, classes):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        *[Residual(width) for _ in range(depth)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=8, help="CPU threads of torch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    net = build(16, 3, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=args.steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in range(args.steps):
        x, y = torch.randn(args.batch, 3, 32, 32), torch.randint(0, 10, (args.batch,))
        loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
