"""A Wasserstein GAN with gradient penalty: the critic learns three times per step of the generator."""

import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "The critic's three steps with their second derivatives are the method; products take nearly all of the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "unused-gradients",
        "recomputation",
        "small-operators",
        "skipped-steps",
        "host-python",
        "evaluation",
    ],
    "healthy": True,
}


def mlp(n_in, n_out, width=512):
    return nn.Sequential(nn.Linear(n_in, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, n_out))


class WGAN:
    def __init__(self, z_dim=64, n=128, penalty=10.0):
        self.z_dim, self.penalty = z_dim, penalty
        self.generator, self.critic = mlp(z_dim, n), mlp(n, 1)
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=1e-4, betas=(0.0, 0.9))

    def sample(self, count):
        return self.generator(torch.randn(count, self.z_dim))

    def gradient_penalty(self, real, fake):
        mix = torch.rand(len(real), 1)
        points = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(points).sum(), points, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.sample(len(real))
        loss = self.critic(fake).mean() - self.critic(real).mean() + self.penalty * self.gradient_penalty(real, fake)
        self.opt_c.zero_grad()
        loss.backward()
        self.opt_c.step()

    def generator_step(self, count):
        self.critic.requires_grad_(False)
        loss = -self.critic(self.sample(count)).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        self.critic.requires_grad_(True)
        return loss


def data(batch=192):
    centres = torch.randn(20, 128) * 2
    while True:
        yield centres[torch.randint(0, 20, (batch,))] + 0.2 * torch.randn(batch, 128)


if __name__ == "__main__":
    torch.manual_seed(0)
    gan, reals = WGAN(), data()
    for step in range(36):
        for _ in range(3):
            gan.critic_step(next(reals))
        loss = gan.generator_step(192)
        if step % 12 == 0:
            print(step, loss.item())
