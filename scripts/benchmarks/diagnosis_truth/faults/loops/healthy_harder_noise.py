"""Restores recordings of vibrating machines; noise grows through the training, from faint to strong."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "The loss rises because the task is made harder on purpose, up to the noise that the sensors have; the error relative to the noise falls, weights and gradients stay in bounds and each step costs the same.",
    "cause": None,
    "also": [],
    "never": [
        "divergence",
        "growth",
        "nan-loss",
        "no-update",
        "gradients-not-cleared",
        "learning-rate-too-small",
        "data-loading",
    ],
    "healthy": True,
}


def vibrations(count, length=256):
    """A shaft with its harmonics, and the ringing of a bearing that is struck once per turn."""
    time = torch.arange(length) / length
    turns = 4 + 12 * torch.rand(count, 1)
    shaft = sum(torch.randn(count, 1) / k * torch.sin(2 * torch.pi * k * turns * time) for k in (1, 2, 3))
    since = (turns * time + torch.rand(count, 1)) % 1
    ringing = torch.exp(-8 * since) * torch.sin(2 * torch.pi * 40 * since / turns * 4)
    return (shaft + ringing).unsqueeze(1)


class Dilated(nn.Module):
    def __init__(self, width, reach):
        super().__init__()
        self.wide = nn.Conv1d(width, 2 * width, 3, padding=reach, dilation=reach)
        self.back = nn.Conv1d(width, width, 1)

    def forward(self, x):
        a, b = self.wide(x).chunk(2, 1)
        return x + self.back(torch.tanh(a) * torch.sigmoid(b))


class Restorer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.enter = nn.Conv1d(1, width, 7, padding=3)
        self.body = nn.Sequential(*[Dilated(width, 2**i) for i in range(5)])
        self.leave = nn.Conv1d(width, 1, 1)

    def forward(self, x):
        return self.leave(self.body(self.enter(x)))


def strength(step, steps, faint=0.05, strong=1.2):
    return faint + (strong - faint) * min(1.0, step / (0.8 * steps))


def main(steps=150, batch=10):
    torch.manual_seed(25)
    recordings = vibrations(1200)
    model = Restorer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        clean = recordings[torch.randint(len(recordings), (batch,))]
        level = strength(step, steps)
        noisy = clean + level * torch.randn_like(clean)
        loss = F.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            print(
                f"step {step + 1}: noise {level:.2f}, error {loss.item():.4f}, share of the noise {loss.item() / level**2:.3f}"
            )


if __name__ == "__main__":
    main()
