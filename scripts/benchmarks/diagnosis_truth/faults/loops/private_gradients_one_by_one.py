"""Differentially private training on tabular data: gradients of single records are clipped, summed and made noisy."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 4,
    "truth": "Each record of a batch has a forward and a backward pass of its own, for its gradient: many tiny operators.",
    "cause": "small-operators",
    "also": ["host-python", "unfused-optimizer"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "logging", "recomputation"],
    "healthy": False,
    "place": [
        "for record, label in zip(x, y)",
        "loss = F.cross_entropy(self.model(record",
        "grads = torch.autograd.grad(",
        "norm = torch.sqrt(",
        "scale = (",
        "total.add_(g * scale)",
        "for total, g in zip(",
        "self.private_gradients(x, y)",
        "self.net(",
        "F.relu(",
        "self.out(",
        "h = h + block",
    ],
    "share": 92,
    "remedy": "gradients of all records at once: torch.func.vmap over torch.func.grad",
    "without": [
        [
            "                losses.append(self.private_gradients(x, y))\n",
            "                whole = F.cross_entropy(self.model(x), y)\n                whole.backward()\n                losses.append(whole.item())\n",
        ]
    ],
}


class Tabular(nn.Module):
    def __init__(self, n_features, n_classes, width=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(n_features, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth)])
        self.out = nn.Linear(width, n_classes)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = h + block(F.relu(h))
        return self.out(F.relu(h))


class DPTrainer:
    """SGD with the Gaussian mechanism (Abadi et al.)."""

    def __init__(self, model, args):
        self.model = model
        self.max_norm = args.max_grad_norm
        self.sigma = args.noise_multiplier
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        self.params = [p for p in model.parameters() if p.requires_grad]

    def private_gradients(self, x, y):
        summed = [torch.zeros_like(p) for p in self.params]
        running = 0.0
        for record, label in zip(x, y):
            loss = F.cross_entropy(self.model(record.unsqueeze(0)), label.unsqueeze(0))
            grads = torch.autograd.grad(loss, self.params)
            norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
            for total, g in zip(summed, grads):
                total.add_(g * scale)
            running += loss.item()
        for p, total in zip(self.params, summed):
            noise = torch.randn_like(total) * self.sigma * self.max_norm
            p.grad = (total + noise) / len(x)
        return running / len(x)

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            losses = []
            for x, y in loader:
                self.optimizer.zero_grad()
                losses.append(self.private_gradients(x, y))
                self.optimizer.step()
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}  (sigma={self.sigma})")


def synthetic(n, n_features, n_classes):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, n_features, generator=g)
    w = torch.randn(n_features, n_classes, generator=g) / math.sqrt(n_features)
    return TensorDataset(x, (x @ w).argmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=0.8)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(synthetic(240, 30, 5), batch_size=args.batch_size, shuffle=True)
    DPTrainer(Tabular(30, 5), args).fit(loader, args.epochs)


if __name__ == "__main__":
    main()
