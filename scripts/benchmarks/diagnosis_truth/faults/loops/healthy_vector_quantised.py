"""Vector-quantised autoencoder of textures; its codebook follows by moving averages, and idle codes are drawn anew."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 6,
    "truth": "Convolutions of encoder and decoder take most of the time; distances to 128 codes and the codebook's averages are little.",
    "cause": None,
    "also": [],
    "never": ["small-operators", "host-python", "no-update", "logging", "growth", "periodic-pause", "dense-gradient"],
    "healthy": True,
}


class Codebook(nn.Module):
    def __init__(self, codes=128, dim=32, decay=0.98):
        super().__init__()
        self.decay = decay
        self.register_buffer("vectors", torch.randn(codes, dim))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.vectors.clone())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        nearest = torch.cdist(flat.detach(), self.vectors).argmin(1)
        if self.training:
            self.follow(flat.detach(), nearest)
        quantised = F.embedding(nearest, self.vectors).view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        commitment = F.mse_loss(z, quantised)
        return z + (quantised - z).detach(), commitment

    @torch.no_grad()
    def follow(self, flat, nearest):
        counts = torch.bincount(nearest, minlength=len(self.counts)).float()
        sums = torch.zeros_like(self.sums).index_add_(0, nearest, flat)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        idle = self.counts < 0.05
        fresh = flat[torch.randint(len(flat), (len(self.counts),))]
        self.sums[idle], self.counts[idle] = fresh[idle], 1.0
        self.vectors.copy_(self.sums / self.counts[:, None])


class VQVAE(nn.Module):
    def __init__(self, width=40, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, dim, 1),
        )  # fmt: skip
        self.codebook = Codebook(dim=dim)
        self.decoder = nn.Sequential(
            nn.Conv2d(dim, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x):
        quantised, commitment = self.codebook(self.encoder(x))
        return self.decoder(quantised), commitment


def textures(count, side=64):
    """Waves of random direction in random colours."""
    axis = torch.arange(side) / side
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    k = 12 * torch.randn(count, 2, 1, 1)
    wave = torch.sin(6.28 * (k[:, 0] * x + k[:, 1] * y)).unsqueeze(1)
    return wave * torch.randn(count, 3, 1, 1) + 0.1 * torch.randn(count, 3, side, side)


class Experiment:
    def __init__(self, lr=1e-3):
        self.model = VQVAE()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def step(self, pictures):
        output, commitment = self.model(pictures)
        error = F.mse_loss(output, pictures)
        self.optimizer.zero_grad()
        (error + 0.25 * commitment).backward()
        self.optimizer.step()
        return error.detach()

    def run(self, steps, batch):
        pictures = textures(256)
        for step in range(steps):
            error = self.step(pictures[torch.randint(len(pictures), (batch,))])
            if step % 30 == 0:
                used = (self.model.codebook.counts > 0.1).sum()
                print(f"step {step}: error {error:.4f}, {used} codes in use")


torch.manual_seed(6)
Experiment().run(steps=100, batch=8)
