"""Mixed precision in bf16 on the CPU, in closures."""

import torch
from torch import nn

CASE = {
    "truth": "A steady loop under bf16 autocast whose time is its products; memory grows, as the kept loss of mse_loss "
    "holds 768 KiB on a CPU.",
    "cause": None,
    "also": ["casts", "growth"],
    "never": ["data-loading", "host-python", "skipped-steps", "nan-loss"],
    "healthy": True,
}


def make_step(model, optimizer):
    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(768, 1024), nn.GELU(), nn.Linear(1024, 768))
step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
losses = [step(torch.randn(256, 768)) for _ in range(40)]
print(torch.stack(losses).mean().item())
