"""A hinge GAN with two time scales on drawings of faces, as a class with everything in it."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = {
    "generation": 13,
    "truth": "The discriminator runs three times and the generator twice in each step, as a GAN demands: fakes of the discriminator's step are made without gradients, and its own weights are frozen in the generator's step. Both losses rise and fall without an end, and that is no fault.",
    "cause": None,
    "also": [],
    "never": ["duplicate-forward", "unused-gradients", "divergence", "repeated-backward", "growth", "evaluation"],
    "healthy": True,
}


def faces(count, size=32):
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")

    def spot(cx, cy, rx, ry):
        return torch.sigmoid(12 * (1 - ((x - cx) / rx) ** 2 - ((y - cy) / ry) ** 2))

    made = []
    for tilt, eye, mouth in torch.rand(count, 3).tolist():
        head = spot(0, 0, 0.7 + 0.15 * tilt, 0.9)
        eyes = spot(-0.3, -0.3, 0.1 + 0.1 * eye, 0.1) + spot(0.3, -0.3, 0.1 + 0.1 * eye, 0.1)
        made.append((head - eyes - spot(0, 0.45, 0.2 + 0.25 * mouth, 0.08)).clamp(0, 1))
    return 2 * torch.stack(made).unsqueeze(1) - 1


class Up(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(
            nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
        )


class FaceGAN:
    def __init__(self, latent=48, width=24):
        self.latent = latent
        self.generator = nn.Sequential(
            nn.Linear(latent, 4 * width * 16),
            nn.Unflatten(1, (4 * width, 4, 4)),
            Up(4 * width, 4 * width),
            Up(4 * width, 2 * width),
            Up(2 * width, width),
            nn.Conv2d(width, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * width * 16, 1),
        )
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=4e-4, betas=(0.0, 0.9))

    def noise(self, count):
        return torch.randn(count, self.latent)

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.generator(self.noise(len(real)))
        loss = F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake)).mean()
        self.opt_c.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_c.step()
        return loss.item()

    def generator_step(self, count):
        self.critic.requires_grad_(False)
        loss = -self.critic(self.generator(self.noise(count))).mean()
        self.opt_g.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_g.step()
        self.critic.requires_grad_(True)
        return loss.item()

    def fit(self, pictures, epochs, batch):
        fixed = self.noise(8)
        for epoch in range(epochs):
            for part in torch.randperm(len(pictures)).split(batch):
                loss_c = self.critic_step(pictures[part])
                loss_g = self.generator_step(len(part))
            self.generator.eval()
            with torch.no_grad():
                spread = self.generator(fixed).std().item()
            self.generator.train()
            print(f"epoch {epoch}: critic {loss_c:.3f} generator {loss_g:.3f} spread {spread:.3f}")


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", "8")))
    FaceGAN().fit(faces(640), epochs=3, batch=32)
