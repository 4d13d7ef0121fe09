"""A DCGAN-like training on small images."""

import torch
from torch import nn

CASE = {
    "generation": 2,
    "truth": "The discriminator's loss goes back through the generator, as the fake images are not detached; zero_grad drops it.",
    "cause": "unused-gradients",
    "also": ["gradients-not-cleared", "skipped-steps", "no-update", "recomputation"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "small-operators"],
    "healthy": False,
    "place": ["discriminator(fake)", "d_loss.backward(", "fake = generator(noise)"],
    "share": 16,
    "remedy": "give the discriminator fake.detach(), or make the fakes under torch.no_grad()",
    "without": [
        [
            "bce(discriminator(fake), fakes)\n        d_loss.backward(retain_graph=True)",
            "bce(discriminator(fake.detach()), fakes)\n        d_loss.backward()",
        ]
    ],
}

Z, BATCH = 64, 32


class Generator(nn.Module):
    def __init__(self, ch=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(Z, 2 * ch, 4, 1, 0),
            nn.BatchNorm2d(2 * ch),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * ch, ch, 4, 2, 1),
            nn.BatchNorm2d(ch),
            nn.ReLU(True),
            nn.ConvTranspose2d(ch, ch, 4, 2, 1),
            nn.BatchNorm2d(ch),
            nn.ReLU(True),
            nn.Conv2d(ch, 1, 3, 1, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(z[..., None, None])


class Discriminator(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, ch, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ch, 2 * ch, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * ch * 16, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    images = torch.rand(512, 1, 16, 16) * 2 - 1
    reals, fakes = torch.full((BATCH,), 0.9), torch.zeros(BATCH)
    for step in range(36):
        real = images[torch.randint(0, len(images), (BATCH,))]
        noise = torch.randn(BATCH, Z)

        opt_d.zero_grad()
        fake = generator(noise)
        d_loss = bce(discriminator(real), reals) + bce(discriminator(fake), fakes)
        d_loss.backward(retain_graph=True)
        opt_d.step()

        opt_g.zero_grad()
        g_loss = bce(discriminator(fake), reals)
        g_loss.backward()
        opt_g.step()
        if step % 12 == 0:
            print(f"[{step}] d {d_loss.item():.3f} g {g_loss.item():.3f}")


if __name__ == "__main__":
    main()
