"""Variational autoencoder of handwriting strokes, trained with a free weight of its KL term."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

CASE = {
    "generation": 17,
    "truth": "Latents come from Normal.sample(), which sends no gradient to the encoder, and not from rsample(). The KL term alone trains the encoder: it forgets its input, and the error of the reconstruction stays near that of the mean picture.",
    "cause": "cut-gradients",
    "also": [],
    "never": [
        "data-loading",
        "host-python",
        "growth",
        "start-up",
        "logging",
        "evaluation",
        "learning-rate-too-small",
        "duplicate-forward",
    ],
    "healthy": False,
    "place": ["latents = posterior.sample()", "return self.decoder(latents), posterior"],
    "remedy": "draw the latents with posterior.rsample()",
    "without": [["posterior.sample()", "posterior.rsample()"]],
}


def strokes(count, size=32):
    """Return pictures of two bent lines each."""
    time = torch.linspace(0, 1, 64)
    grid = torch.linspace(-1, 1, size)
    pictures = torch.zeros(count, size, size)
    for _ in range(2):
        a, b, c, d = torch.randn(4, count, 1) * 0.6
        x, y = a + b * time + 0.3 * torch.sin(6 * c * time), d + c * time
        near = (grid[None, None] - x[..., None]) ** 2, (grid[None, None] - y[..., None]) ** 2
        pictures += torch.einsum("ntx,nty->nyx", torch.exp(-near[0] * 80), torch.exp(-near[1] * 80))
    return pictures.clamp(0, 1)[:, None]


class Autoencoder(nn.Module):
    def __init__(self, latents=24, width=24):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1), nn.SiLU(),
            nn.Flatten(), nn.Linear(2 * width * 64, 2 * latents),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latents, 2 * width * 64), nn.SiLU(), nn.Unflatten(1, (2 * width, 8, 8)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, pictures):
        mean, spread = self.encoder(pictures).chunk(2, 1)
        posterior = Normal(mean, F.softplus(spread) + 1e-4)
        latents = posterior.sample()
        return self.decoder(latents), posterior


class Trainer:
    def __init__(self, model, beta=0.5):
        self.model, self.beta = model, beta
        self.prior = Normal(0.0, 1.0)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step(self, pictures):
        scores, posterior = self.model(pictures)
        error = F.binary_cross_entropy_with_logits(scores, pictures, reduction="none").sum((1, 2, 3)).mean()
        kl = kl_divergence(posterior, self.prior).sum(1).mean()
        self.optimizer.zero_grad()
        (error + self.beta * kl).backward()
        self.optimizer.step()
        return error.item(), kl.item()

    def fit(self, pictures, steps, size=64):
        for step in range(1, steps + 1):
            error, kl = self.step(pictures[torch.randint(len(pictures), (size,))])
            if step % 30 == 0:
                print(f"step {step}: error {error:.1f}, KL {kl:.2f}")


if __name__ == "__main__":
    torch.manual_seed(73)
    Trainer(Autoencoder()).fit(strokes(3000), steps=150)
