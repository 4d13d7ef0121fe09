"""Wide layers in bf16."""

import torch
from torch import nn

CASE = {
    "truth": "Products of 8192 x 8192 in bf16 with few other kernels; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "elementwise-chain", "fp32-products", "slow-products"],
    "healthy": True,
    "requires": ["cuda"],
}

torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (nn.Linear(8192, 8192, bias=False), nn.ReLU(inplace=True))]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
x, y = torch.randn(8192, 8192, device="cuda").bfloat16(), torch.randn(8192, 8192, device="cuda").bfloat16()
for _step in range(40):
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
