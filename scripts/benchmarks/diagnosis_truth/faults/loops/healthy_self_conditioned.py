"""Diffusion over piano rolls with self-conditioning: half of the steps first guess the clean roll without gradients."""

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 6,
    "truth": "A first guess without gradients in half of the steps is the method; the convolutions of all passes take the time.",
    "cause": None,
    "also": [],
    "never": ["duplicate-forward", "evaluation", "periodic-pause", "small-operators", "host-python", "growth"],
    "healthy": True,
}


class Layer(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
        self.time = nn.Linear(width, width)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x, t):
        a, b = self.conv(x + self.time(t)[:, :, None]).chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


class Denoiser(nn.Module):
    def __init__(self, pitches=64, width=96, depth=5):
        super().__init__()
        self.enter = nn.Conv1d(2 * pitches, width, 1)
        self.layers = nn.ModuleList(Layer(width, 2**i) for i in range(depth))
        self.leave = nn.Conv1d(width, pitches, 1)
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, math.log(500), width // 2)))

    def forward(self, noisy, guess, time):
        angle = time[:, None] * self.frequencies
        t = torch.cat([angle.sin(), angle.cos()], 1)
        x = self.enter(torch.cat([noisy, guess], 1))
        for layer in self.layers:
            x = layer(x, t)
        return self.leave(F.relu(x))


class Averaged:
    """Exponential average of the weights, for sampling later."""

    def __init__(self, model, decay=0.995):
        self.decay, self.weights = decay, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        torch._foreach_lerp_(self.weights, list(model.parameters()), 1 - self.decay)


def rolls(count, pitches=64, ticks=192):
    """Arpeggios over random chords."""
    roots = torch.randint(12, 36, (count, ticks // 16)).repeat_interleave(16, 1)
    notes = torch.stack([roots, roots + 4, roots + 7], 1)
    roll = torch.zeros(count, pitches, ticks)
    return roll.scatter_(1, notes, 1.0) * 2 - 1


def train(steps=80, batch=6, seed=0):
    torch.manual_seed(seed)
    coin = random.Random(seed)
    model = Denoiser()
    average, optimizer = Averaged(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        clean, time = rolls(batch), torch.rand(batch)
        keep = torch.cos(time * math.pi / 2)[:, None, None]
        noisy = keep * clean + (1 - keep**2).sqrt() * torch.randn_like(clean)
        guess = torch.zeros_like(clean)
        if coin.random() < 0.5:
            with torch.no_grad():
                guess = model(noisy, guess, time)
        loss = F.mse_loss(model(noisy, guess, time), clean)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        if step % 25 == 0:
            print(f"{step:4d}: {loss.item():.4f}")


if __name__ == "__main__":
    train()
