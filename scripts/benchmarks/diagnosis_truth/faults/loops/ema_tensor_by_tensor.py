"""Averaging of the weights, written tensor by tensor, for a network of many small tensors."""

import torch
from torch import nn

CASE = {
    "truth": "The average of the weights, updated tensor by tensor with three averages, takes half of the step.",
    "cause": "host-python",
    "also": ["small-operators", "unfused-optimizer"],
    "never": ["data-loading", "evaluation", "start-up"],
    "healthy": False,
}


class Ema:
    def __init__(self, model, decays=(0.9, 0.99, 0.999)):
        self.decays = decays
        self.shadow = {d: {n: p.detach().clone() for n, p in model.named_parameters()} for d in decays}

    @torch.no_grad()
    def update(self, model):
        for decay in self.decays:
            for name, p in model.named_parameters():
                average = self.shadow[decay][name]
                average.copy_(decay * average + (1 - decay) * p)


torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.Tanh()) for _ in range(100)])
opt = torch.optim.SGD(net.parameters(), lr=0.01, foreach=True)
ema = Ema(net)
for step in range(60):
    out = net(torch.randn(16, 24))
    loss = out.square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    ema.update(net)
