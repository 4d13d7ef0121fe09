"""A generator and a discriminator, each with its optimizer."""

import torch
from torch import nn

CASE = {
    "truth": "Two networks are trained in turn, both by products of some size; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "duplicate-forward", "evaluation"],
    "healthy": True,
}

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh())
D = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))
g_opt = torch.optim.Adam(G.parameters(), 2e-4, (0.5, 0.999), fused=True)
d_opt = torch.optim.Adam(D.parameters(), 2e-4, (0.5, 0.999), fused=True)
bce = nn.BCEWithLogitsLoss()
one, zero = torch.ones(256, 1), torch.zeros(256, 1)
for i in range(50):
    real, fake = torch.rand(256, 784) * 2 - 1, G(torch.randn(256, 64))
    d_loss = bce(D(real), one) + bce(D(fake.detach()), zero)
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    g_loss = bce(D(fake), one)
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
