"""A guard against large gradients skips the update in two of three steps."""

import torch
from torch import nn

CASE = {
    "truth": "The guard on the gradients' norm skips two of three updates, by a threshold that is too low.",
    "cause": "skipped-steps",
    "also": ["no-update"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
skipped = 0
for step in range(120):
    x = torch.randn(64, 128) * (1.0 if step % 3 == 0 else 3.0)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if norm > 1.5:
        skipped += 1
        continue
    optimizer.step()
print("skipped", skipped)
