"""Generative adversarial network that draws small textures: stripes and dots of different sizes."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "The loss of the discriminator is propagated back through the whole generator too, as the fake images are not detached; the gradients that arrive there are cleared unused: 30% of the loop's time.",
    "cause": "unused-gradients",
    "also": [],
    "never": [
        "data-loading",
        "host-python",
        "growth",
        "evaluation",
        "logging",
        "start-up",
        "duplicate-forward",
        "gradients-not-cleared",
    ],
    "healthy": False,
    "place": [
        "judged = self.critic(fake)",
        "(real_loss + fake_loss).backward(retain_graph=True)",
    ],
    "share": 30,
    "remedy": "give the discriminator fake.detach() in its own step",
    "without": [
        ["        judged = self.critic(fake)\n", "        judged = self.critic(fake.detach())\n"],
        ["backward(retain_graph=True)", "backward()"],
    ],
}


def textures(count, size=32):
    """Return stripes with random directions, widths and phases."""
    line = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(line, line, indexing="ij")
    angle, width, phase = torch.rand(3, count, 1, 1)
    along = x * torch.cos(3.14 * angle) + y * torch.sin(3.14 * angle)
    stripes = torch.sin(along * (6 + 12 * width) + 6.28 * phase)
    return torch.tanh(2 * stripes)[:, None]


class Generator(nn.Module):
    def __init__(self, noise=32, width=64):
        super().__init__()
        self.start = nn.Linear(noise, width * 8 * 8)
        self.width = width
        self.body = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
            nn.BatchNorm2d(width // 2), nn.ReLU(), nn.Conv2d(width // 2, width // 2, 3, padding=1),
            nn.BatchNorm2d(width // 2), nn.ReLU(), nn.ConvTranspose2d(width // 2, 16, 4, 2, 1),
            nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise):
        return self.body(self.start(noise).unflatten(1, (self.width, 8, 8)))


def make_critic(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(2 * width * 64, 1),
    )  # fmt: skip


class Trainer:
    def __init__(self, noise=32):
        self.noise = noise
        self.generator, self.critic = Generator(noise), make_critic()
        self.g_opt = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.d_opt = torch.optim.Adam(self.critic.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step(self, real):
        fake = self.generator(torch.randn(len(real), self.noise))

        self.d_opt.zero_grad()
        sure = self.critic(real)
        judged = self.critic(fake)
        real_loss = F.binary_cross_entropy_with_logits(sure, torch.full_like(sure, 0.9))
        fake_loss = F.binary_cross_entropy_with_logits(judged, torch.zeros_like(judged))
        (real_loss + fake_loss).backward(retain_graph=True)
        self.d_opt.step()

        self.g_opt.zero_grad()
        self.critic.requires_grad_(False)
        fooled = self.critic(fake)
        g_loss = F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))
        g_loss.backward()
        self.g_opt.step()
        self.critic.requires_grad_(True)
        return (real_loss + fake_loss).item(), g_loss.item()


def main(steps=56, batch=32):
    torch.manual_seed(14)
    trainer = Trainer()
    for step in range(1, steps + 1):
        d_loss, g_loss = trainer.step(textures(batch))
        if step % 14 == 0:
            print(f"[{step}/{steps}] D {d_loss:.3f} G {g_loss:.3f}")


if __name__ == "__main__":
    main()
