"""Contrastive training with distances between all pairs of a batch."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 2,
    "truth": "The distances come from a tensor of all differences (B, B, D), whose elementwise operations take most of the step.",
    "cause": "elementwise-chain",
    "also": ["activations"],
    "never": ["start-up", "data-loading", "evaluation", "small-operators", "growth"],
    "healthy": False,
    "place": ["a[:, None, :] - b[None, :, :]", "difference.pow(2)", "pairwise_sq(za, zb)"],
    "share": 72,
    "remedy": "use a matrix product: |a|² + |b|² − 2 a·b, or torch.cdist",
    "without": [
        [
            "    difference = a[:, None, :] - b[None, :, :]\n    return difference.pow(2).sum(-1)\n",
            "    return a.pow(2).sum(-1, keepdim=True) + b.pow(2).sum(-1) - 2 * a @ b.T\n",
        ]
    ],
}


class Encoder(nn.Module):
    def __init__(self, n_in, d_hidden=512, d_out=128):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, d_hidden), nn.ReLU(), nn.Linear(d_hidden, d_hidden), nn.ReLU())
        self.projector = nn.Linear(d_hidden, d_out)

    def forward(self, x):
        return F.normalize(self.projector(self.trunk(x)), dim=-1)


def pairwise_sq(a, b):
    difference = a[:, None, :] - b[None, :, :]
    return difference.pow(2).sum(-1)


class ContrastiveLoss(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1 / temperature).log())

    def forward(self, za, zb):
        logits = -pairwise_sq(za, zb) * self.log_scale.exp()
        target = torch.arange(len(za))
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def views(features, generator):
    noise = torch.randn(features.shape, generator=generator)
    keep = (torch.rand(features.shape, generator=generator) > 0.1).float()
    return features + 0.1 * noise, features * keep


def train(steps=36, batch=192):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(4096, 256)
    encoder, criterion = Encoder(256), ContrastiveLoss()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *criterion.parameters()], lr=1e-3, weight_decay=0.05)
    for step in range(steps):
        anchor, positive = views(data[torch.randint(0, len(data), (batch,))], generator)
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(encoder(anchor), encoder(positive))
        loss.backward()
        optimizer.step()
        if (step + 1) % 12 == 0:
            print(f"[{step + 1:4d}] loss={loss.item():.4f} scale={criterion.log_scale.exp().item():.2f}")


if __name__ == "__main__":
    train()
