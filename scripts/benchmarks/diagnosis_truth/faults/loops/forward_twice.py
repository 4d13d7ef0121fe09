"""One forward for the loss and one for the metrics of the same batch."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "truth": "The same batch goes through the model twice per step, once for the loss and once for the accuracy.",
    "cause": "duplicate-forward",
    "also": ["evaluation"],
    "never": ["start-up", "data-loading", "recomputation", "small-operators"],
    "healthy": False,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, stride=2)
        self.fc = nn.Linear(32 * 16 * 16, 10)

    def forward(self, x):
        return self.fc(F.relu(self.c2(F.relu(self.c1(x)))).flatten(1))


def compute_loss(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def compute_accuracy(net, batch):
    return (net(batch[0]).argmax(1) == batch[1]).float().mean()


torch.manual_seed(0)
net = Net()
opt = torch.optim.Adam(net.parameters())
for step in range(36):
    batch = torch.randn(24, 3, 32, 32), torch.randint(0, 10, (24,))
    loss = compute_loss(net, batch)
    acc = compute_accuracy(net, batch)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 12 == 0:
        print(f"{step}: loss {loss:.3f} acc {acc:.2f}")
