"""GAN of small digits-like strokes with a spectrally normalised discriminator and the hinge loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm

CASE = {
    "generation": 8,
    "truth": "spectral_norm is set to 50 power iterations for each forward pass of each layer, where one is enough: hundreds of small matrix-vector products per step.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": ["data-loading", "logging", "evaluation", "growth", "start-up", "no-update", "duplicate-forward"],
    "healthy": False,
    "place": ["spectral_norm(", "n_power_iterations=50", "critic("],
    "share": 45,
    "remedy": "n_power_iterations=1, the default",
    "without": [["n_power_iterations=50", "n_power_iterations=1"]],
}


def normed(layer):
    return spectral_norm(layer, n_power_iterations=50)


class Critic(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(
            normed(nn.Conv2d(1, width, 4, 2, 1)), nn.LeakyReLU(0.1),
            normed(nn.Conv2d(width, 2 * width, 4, 2, 1)), nn.LeakyReLU(0.1),
            normed(nn.Conv2d(2 * width, 4 * width, 4, 2, 1)), nn.LeakyReLU(0.1),
            nn.Flatten(), normed(nn.Linear(4 * width * 16, 1)),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x).squeeze(1)


class Generator(nn.Module):
    def __init__(self, latent=32, width=24):
        super().__init__()
        self.first = nn.Linear(latent, 4 * width * 16)
        self.net = nn.Sequential(
            nn.BatchNorm2d(4 * width), nn.ReLU(), nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            nn.BatchNorm2d(2 * width), nn.ReLU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z):
        return self.net(self.first(z).view(len(z), -1, 4, 4))


def strokes(count, side=32):
    """A thick arc per picture."""
    axis = torch.linspace(-1, 1, side)
    centre = 0.4 * torch.randn(count, 2, 1, 1)
    d = ((axis[None, :, None] - centre[:, 0]) ** 2 + (axis[None, None] - centre[:, 1]) ** 2).sqrt()
    ring = torch.exp(-(((d - torch.rand(count, 1, 1)) / 0.12) ** 2))
    return 2 * ring.unsqueeze(1) - 1


def main(iterations=100, batch=8, latent=32):
    torch.manual_seed(37)
    pictures = strokes(1024)
    critic, generator = Critic(), Generator(latent)
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.0, 0.9))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.0, 0.9))
    for i in range(iterations):
        real = pictures[torch.randint(len(pictures), (batch,))]
        fake = generator(torch.randn(batch, latent))
        loss_c = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
        optimizer_c.zero_grad()
        loss_c.backward()
        optimizer_c.step()

        loss_g = -critic(fake).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        if i % 25 == 0:
            print(f"{i:4d}  critic {loss_c.item():.3f}  generator {loss_g.item():.3f}")


if __name__ == "__main__":
    main()
