"""Adam written by hand, in a loop over five hundred small parameters."""

import torch
from torch import nn

CASE = {
    "truth": "The optimizer, a Python loop with ten operators per parameter, takes two thirds of the step.",
    "cause": "unfused-optimizer",
    "also": ["small-operators", "host-python"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}


class MyAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["t"] += 1
                s["m"] = b1 * s["m"] + (1 - b1) * p.grad
                s["v"] = b2 * s["v"] + (1 - b2) * p.grad * p.grad
                m = s["m"] / (1 - b1 ** s["t"])
                v = s["v"] / (1 - b2 ** s["t"])
                p -= group["lr"] * m / (v.sqrt() + group["eps"])


torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(250)])
opt = MyAdam(net.parameters())
for _ in range(32):
    opt.zero_grad()
    loss = net(torch.randn(8, 16)).square().sum()
    loss.backward()
    opt.step()
