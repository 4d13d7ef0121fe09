"""A convolutional residual network that clones its activations to be safe."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 2,
    "truth": "Each block clones its input and output and makes them contiguous again: copies that nothing needs.",
    "cause": "needless-copies",
    "also": ["layout-conversion", "elementwise-chain"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "small-operators", "host-python"],
    "healthy": False,
    "place": ["x.clone()", "out.clone()", "taps[", ".contiguous()", "skip = "],
    "share": 24,
    "remedy": "remove clone() and contiguous(): no operation here writes in place",
    "without": [
        ["        skip = x.clone()\n", "        skip = x\n"],
        ["out.clone().contiguous()", "out"],
        ["x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous()", "x"],
        ["        self.taps[self.name] = x.detach().clone()\n", ""],
    ],
}


class SafeBlock(nn.Module):
    def __init__(self, width, name, taps):
        super().__init__()
        self.name, self.taps = name, taps
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.GroupNorm(8, width)
        self.scale = nn.Parameter(torch.full((1, width, 1, 1), 0.1))

    def forward(self, x):
        skip = x.clone()
        self.taps[self.name] = x.detach().clone()
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous()
        out = self.scale * F.relu(self.norm(self.depthwise(x)))
        out = out.clone().contiguous()
        return skip + out


class Net(nn.Module):
    def __init__(self, width=64, depth=6, classes=20):
        super().__init__()
        self.taps = {}
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*[SafeBlock(width, f"block{i}", self.taps) for i in range(depth)])
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def augment(x):
    if torch.rand(()) < 0.5:
        x = x.flip(-1)
    dy, dx = torch.randint(-2, 3, (2,)).tolist()
    return x.roll((dy, dx), (-2, -1))


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
data, target = torch.randn(256, 3, 96, 96), torch.randint(0, 20, (256,))
for epoch in range(3):
    order = torch.randperm(len(data))
    for chunk in order.split(16)[:12]:
        loss = F.cross_entropy(net(augment(data[chunk])), target[chunk])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
