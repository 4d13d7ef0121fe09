"""RMSNorm, SwiGLU and dropout written as formulas."""

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "Norm, gate, dropout and residuals are chains of elementwise kernels that read and write memory each time.",
    "cause": "elementwise-chain",
    "also": ["casts"],
    "never": ["host-python", "data-loading", "launch-bound", "host-sync", "unfused-attention"],
    "healthy": False,
    "requires": ["cuda"],
}


class Norm(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.norm = Norm(d_model)
        self.gate, self.up = nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, 2 * d_model)
        self.down = nn.Linear(2 * d_model, d_model)

    def forward(self, x):
        y = self.norm(x)
        gate = self.gate(y)
        y = gate * (1 / (1 + torch.exp(-gate))) * self.up(y)
        y = y * (torch.rand_like(y) > 0.1) / 0.9
        return x + self.down(y)


torch.manual_seed(0)
model = nn.Sequential(*[Layer(1024) for _ in range(8)], Norm(1024), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
x, y = torch.randn(32768, 1024, device="cuda"), torch.randint(0, 10, (32768,), device="cuda")
for _step in range(40):
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
