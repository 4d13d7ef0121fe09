"""Denoising diffusion of small curves, from functions; a network learns the noise that was added."""

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Noise and moments are default arguments, which Python evaluates once: each step adds the same noise to the same rows at the same moments, so that the network learns it by heart.",
    "cause": "same-randomness",
    "also": [],
    "never": ["data-loading", "host-python", "growth", "start-up", "logging", "evaluation", "no-update"],
    "healthy": False,
    "place": [
        "def diffused(x, noise=torch.randn(BATCH, LENGTH), moment=torch.randint(STAGES, (BATCH,))):",
        "noisy, noise, moment = diffused(x)",
    ],
    "remedy": "draw noise and moments inside the function",
    "without": [
        [
            "def diffused(x, noise=torch.randn(BATCH, LENGTH), moment=torch.randint(STAGES, (BATCH,))):\n",
            "def diffused(x):\n    noise, moment = torch.randn(BATCH, LENGTH), torch.randint(STAGES, (BATCH,))\n",
        ]
    ],
}

BATCH, LENGTH, STAGES = 256, 64, 100
torch.manual_seed(77)
KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STAGES), 0)


def curves():
    place = torch.linspace(0, 6.2832, LENGTH)
    return torch.sin(place * torch.randint(1, 4, (BATCH, 1)) + 6.2832 * torch.rand(BATCH, 1))


def diffused(x, noise=torch.randn(BATCH, LENGTH), moment=torch.randint(STAGES, (BATCH,))):
    kept = KEPT[moment].unsqueeze(1)
    return kept.sqrt() * x + (1 - kept).sqrt() * noise, noise, moment


def denoiser(width=512):
    return nn.ModuleDict(
        {
            "time": nn.Embedding(STAGES, width),
            "lift": nn.Linear(LENGTH, width),
            "body": nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, LENGTH)),
        }
    )


def predict(net, noisy, moment):
    return net["body"](net["lift"](noisy) + net["time"](moment))


def train(steps=150):
    net = denoiser()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        x = curves()
        noisy, noise, moment = diffused(x)
        loss = nn.functional.mse_loss(predict(net, noisy, moment), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 29:
            print(f"step {step + 1}: {loss.item():.4f}")
    return net


if __name__ == "__main__":
    train()
