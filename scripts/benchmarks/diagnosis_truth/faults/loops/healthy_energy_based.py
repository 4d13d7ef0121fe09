"""An energy-based model of pictures, trained by contrastive divergence with short Langevin chains."""

import random

import torch
from torch import nn

CASE = {
    "generation": 5,
    "truth": "Each step moves its samples by eight gradients of the energy, as the method asks; the convolutions of these take the time.",
    "cause": None,
    "also": [],
    "never": ["repeated-backward", "duplicate-forward", "evaluation", "small-operators", "host-python", "growth"],
    "healthy": True,
}


class Energy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=1, padding=2),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 49, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


class Chains:
    """Samples of earlier steps, from which most chains go on."""

    def __init__(self, shape, size=1024, fresh=0.05):
        self.pool, self.fresh = torch.rand(size, *shape), fresh

    def start(self, count):
        index = torch.tensor(random.sample(range(len(self.pool)), count))
        x = self.pool[index]
        new = torch.rand(count) < self.fresh
        x[new] = torch.rand_like(x[new])
        return index, x

    def keep(self, index, x):
        self.pool[index] = x


def langevin(energy, x, steps=8, size=4.0, noise=0.01):
    for parameter in energy.parameters():
        parameter.requires_grad_(False)
    for _ in range(steps):
        x = (x + noise * torch.randn_like(x)).requires_grad_(True)
        (slope,) = torch.autograd.grad(energy(x).sum(), x)
        x = (x.detach() - size * slope.clamp(-0.03, 0.03)).clamp(0, 1)
    for parameter in energy.parameters():
        parameter.requires_grad_(True)
    return x


def rings(batch, side=28):
    line = torch.linspace(-1, 1, side)
    radius = 0.3 + 0.5 * torch.rand(batch, 1, 1, 1)
    distance = (line[:, None] ** 2 + line[None, :] ** 2).sqrt()
    return torch.exp(-60 * (distance - radius) ** 2)


def train(energy, chains, optimizer, batches, batch=48, alpha=0.1):
    for number in range(batches):
        real = (rings(batch) + 0.005 * torch.randn(batch, 1, 28, 28)).clamp(0, 1)
        index, fake = chains.start(batch)
        fake = langevin(energy, fake)
        chains.keep(index, fake)
        e_real, e_fake = energy(torch.cat([real, fake])).chunk(2)
        loss = (e_real - e_fake).mean() + alpha * (e_real.square() + e_fake.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(energy.parameters(), 0.1)
        optimizer.step()
        if number % 15 == 0:
            yield number, e_real.mean().item(), e_fake.mean().item()


if __name__ == "__main__":
    torch.manual_seed(8)
    random.seed(8)
    model = Energy()
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.0, 0.999))
    for number, real, fake in train(model, Chains((1, 28, 28)), adam, batches=42):
        print(f"batch {number}: energy of data {real:+.4f}, of samples {fake:+.4f}")
