"""zero_grad() stands between backward() and step()."""

import torch
from torch import nn

CASE = {
    "truth": "zero_grad() is called between backward() and step(), so that the optimizer never changes a weight.",
    "cause": "no-update",
    "also": ["skipped-steps"],
    "never": ["start-up", "data-loading", "evaluation", "nan-loss"],
    "healthy": False,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(200, 400), nn.Linear(400, 200)

    def forward(self, x):
        return self.b(torch.nn.functional.gelu(self.a(x)))


def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    for epoch in range(3):
        total = 0.0
        for _ in range(20):
            x = torch.randn(128, 200)
            loss = nn.functional.mse_loss(net(x), x.flip(1))
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()
            total += loss.item()
        print(epoch, total / 20)


if __name__ == "__main__":
    main()
