"""A forward hook is registered in every step and never removed."""

import torch
from torch import nn

CASE = {
    "truth": "Every step registers one more forward hook per layer, so that each step is slower than the one before.",
    "cause": "growth",
    "also": ["host-python", "logging"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}


def record_norms(model, store):
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, i, o, name=name: store.__setitem__(name, o.detach().norm().item()))


torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16)], nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters())
store = {}
for step in range(120):
    record_norms(model, store)
    x, y = torch.randn(32, 64), torch.randint(0, 3, (32,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(len(store))
