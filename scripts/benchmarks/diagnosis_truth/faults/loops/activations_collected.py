"""A hook collects the outputs of a layer for a later analysis, and nobody clears the list."""

import torch
from torch import nn

CASE = {
    "truth": "Outputs of a layer are appended to a list in each step and never cleared: memory grows by 8 MB per step.",
    "cause": "growth",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "recompilation"],
    "healthy": False,
}


class Probe:
    def __init__(self, module):
        self.seen = []
        module.register_forward_hook(self)

    def __call__(self, module, args, output):
        self.seen.append(output)


torch.manual_seed(2)
net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
probe = Probe(net[1])
opt = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-4)
for i in range(60):
    x, y = torch.randn(2048, 64), torch.randint(0, 10, (2048,))
    loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("collected", len(probe.seen))
