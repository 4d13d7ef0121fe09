"""Time series with a GRU, and the weights averaged over all steps at the end."""

import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "A copy of all weights is kept in a list after each step for a later mean: memory grows by 3 MiB per step.",
    "cause": "growth",
    "also": ["model-copies"],
    "never": ["start-up", "data-loading", "evaluation", "small-operators", "periodic-pause", "checkpoint-writing"],
    "healthy": False,
    "place": ["self.snapshots.append(", "p.detach().clone()", "average.collect("],
    "share": None,
    "remedy": "keep one running mean, as torch.optim.swa_utils.AveragedModel does",
    "without": [["            average.collect(model)\n", ""]],
}


class AverageOfWeights:
    def __init__(self):
        self.snapshots = []

    def collect(self, model):
        self.snapshots.append({name: p.detach().clone() for name, p in model.named_parameters()})

    def apply(self, model):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if self.snapshots:
                    p.copy_(torch.stack([s[name] for s in self.snapshots]).mean(0))


class Forecaster(nn.Module):
    def __init__(self, features=8, hidden=320):
        super().__init__()
        self.gru = nn.GRU(features, hidden, num_layers=1, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.memory = nn.Linear(hidden, hidden * 4)

    def forward(self, x):
        last = self.gru(x)[0][:, -1]
        gate = self.memory(last).view(len(x), 4, -1).softmax(1).sum(1)
        return self.head(last * gate).squeeze(-1)


def series(batch, length=24):
    t = torch.arange(length + 1) + 10 * torch.rand(batch, 1)
    x = torch.stack([torch.sin(t / (3 + k)) for k in range(8)], -1) + 0.05 * torch.randn(batch, length + 1, 8)
    return x[:, :-1], x[:, -1, 0]


def train(epochs=4, steps=25):
    torch.manual_seed(0)
    model, average = Forecaster(), AverageOfWeights()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.7)
    for epoch in range(epochs):
        for _ in range(steps):
            x, y = series(32)
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            average.collect(model)
        scheduler.step()
        print(f"{epoch}: {loss.item():.4f}")
    average.apply(model)


train()
