"""Fields of papers from who cites whom; a few papers are cited very often."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "x[source] takes rows by indexing, whose gradient sorts 1.5 million indices and adds the rows of an often "
    "repeated index one after the other; index_select's adds them atomically. Measured: 57%.",
    "cause": "index-backward",
    "also": ["low-occupancy"],
    "never": ["data-loading", "host-sync", "launch-bound", "fp64-products", "exposed-copies"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["x[source]"],
}

STEPS = 50
PAPERS = 100_000
CITATIONS = 1_500_000
FEATURES = 256
WIDTH = 128
FIELDS = 40
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own = nn.Linear(width, width)
        self.others = nn.Linear(width, width, bias=False)

    def forward(self, x, source, target, share):
        messages = x[source] * share
        gathered = torch.zeros_like(x).index_add(0, target, messages)
        return F.relu(self.own(x) + self.others(gathered))


class Network(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Convolution(WIDTH) for _ in range(layers))
        self.leave = nn.Linear(WIDTH, FIELDS)

    def forward(self, features, source, target, share):
        x = F.relu(self.enter(features))
        for layer in self.layers:
            x = x + layer(x, source, target, share)
        return self.leave(x)


def graph():
    """Sources follow a power law, the largest about one per cent of all; targets are even."""
    rank = (torch.arange(PAPERS, device=device) + 3.0).pow(-0.8)
    source = torch.multinomial(rank, CITATIONS, replacement=True)
    target = torch.randint(PAPERS, (CITATIONS,), device=device)
    degree = torch.bincount(target, minlength=PAPERS).clamp_min(1)
    return source, target, (1.0 / degree)[target, None]


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
source, target, share = graph()
features = torch.randn(PAPERS, FEATURES, device=device)
fields = torch.randint(FIELDS, (PAPERS,), device=device)
model = Network().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)

for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(features, source, target, share), fields)
    loss.backward()
    optimizer.step()
elapsed = clock() - start
print(f"loss {loss.item():.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
