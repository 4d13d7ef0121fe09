"""Only the head is trained, but the backbone computes its gradients too."""

import torch
from torch import nn

CASE = {
    "truth": "The backbone's gradients are computed in every step although only the head is in the optimizer.",
    "cause": "unused-gradients",
    "also": ["gradients-not-cleared", "gradient-memory"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}

torch.manual_seed(0)
backbone = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])
head = nn.Linear(512, 5)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
for step in range(40):
    x, y = torch.randn(256, 512), torch.randint(0, 5, (256,))
    loss = nn.functional.cross_entropy(head(backbone(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
