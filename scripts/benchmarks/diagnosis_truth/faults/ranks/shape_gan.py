"""A GAN for small images of ellipses, data-parallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 11,
    "truth": "In the generator's half of the step backward also computes the discriminator's weight gradients and DDP reduces them, and the next zero_grad throws them away.",
    "cause": "unused-gradients",
    "also": ["exposed-communication"],
    "never": [
        "straggler",
        "data-loading",
        "small-buckets",
        "no-sync-missing",
        "find-unused-parameters",
        "checkpoint-writing",
        "growth",
    ],
    "healthy": False,
    "ranks": 2,
    "place": ["verdict = critic(fake)", "loss.backward()"],
    "share": 43,
    "remedy": "for the generator's half set requires_grad_(False) on the discriminator and call its module",
    "without": [
        [
            "        verdict = critic(fake)\n",
            "        critic.module.requires_grad_(False)\n        verdict = critic.module(fake)\n        critic.module.requires_grad_(True)\n",
        ]
    ],
}

SIDE, NOISE = 28, 64


def draw_ellipses(count, generator):
    axis = torch.linspace(-1, 1, SIDE)
    middle = torch.rand(count, 2, 1, 1, generator=generator) - 0.5
    radius = 0.2 + 0.3 * torch.rand(count, 2, 1, 1, generator=generator)
    inside = ((axis[:, None] - middle[:, 0]) / radius[:, 0]) ** 2 + ((axis[None] - middle[:, 1]) / radius[:, 1]) ** 2
    return torch.tanh(4 * (1 - inside)).flatten(1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE, 192),
            nn.LeakyReLU(0.2),
            nn.Linear(192, 256),
            nn.LeakyReLU(0.2),
            nn.Linear(256, SIDE**2),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.layers(z)


class Critic(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SIDE**2, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.layers(x).squeeze(1)


def hinge(real, fake):
    return nn.functional.relu(1 - real).mean() + nn.functional.relu(1 + fake).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator, critic = DDP(Generator()), DDP(Critic())
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.02)
    optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.9))
    torch.manual_seed(10 + rank)
    images = draw_ellipses(2048, torch.Generator().manual_seed(rank))
    batch = 16
    for step in range(100):
        real = images[torch.randint(0, len(images), (batch,))]
        fake = generator(torch.randn(batch, NOISE))
        scores = critic(torch.cat([real, fake.detach()]))
        loss = hinge(scores[:batch], scores[batch:])
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()

        verdict = critic(fake)
        loss = -verdict.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 and rank == 0:
            print(f"step {step}: generator {loss.item():.3f}, real {scores[:batch].mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
