"""A generator of point clouds in the plane, trained by the Sinkhorn divergence between its points and the data's."""

import math

import torch
from torch import nn

CASE = {
    "generation": 9,
    "truth": "Thirty rounds of log-sum-exp over 192 by 192 costs run before each loss, without gradients: they find the optimal transport and are the method itself. The gradient then goes once through the costs.",
    "cause": None,
    "also": ["elementwise-chain"],
    "never": [
        "no-update", "duplicate-forward", "repeated-backward", "growth", "host-python", "data-loading", "logging",
        "evaluation", "small-operators", "periodic-pause", "decompositions",
    ],
    "healthy": True,
}  # fmt: skip


def spirals(count):
    turn = 3 * math.pi * torch.rand(count) ** 0.5
    arm = math.pi * torch.randint(2, (count,))
    points = torch.stack([turn * torch.cos(turn + arm), turn * torch.sin(turn + arm)], 1) / 8
    return points + 0.03 * torch.randn(count, 2)


def costs(a, b):
    return ((a[:, None] - b[None]) ** 2).sum(2) / 2


@torch.no_grad()
def potentials(cost, blur, rounds):
    n, m = cost.shape
    f, g = cost.new_zeros(n), cost.new_zeros(m)
    for _ in range(rounds):
        f = -blur * (torch.logsumexp((g[None] - cost) / blur, 1) - math.log(m))
        g = -blur * (torch.logsumexp((f[:, None] - cost) / blur, 0) - math.log(n))
    return f, g


def transport(a, b, blur=0.02, rounds=15):
    """Entropic cost of carrying a to b; by the envelope theorem the plan counts as constant for the gradient."""
    cost = costs(a, b)
    f, g = potentials(cost.detach(), blur, rounds)
    plan = torch.exp((f[:, None] + g[None] - cost.detach()) / blur) / cost.numel()
    return (plan * cost).sum()


class Generator(nn.Module):
    def __init__(self, noise=8, width=256):
        super().__init__()
        self.noise = noise
        self.net = nn.Sequential(
            nn.Linear(noise, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2),
        )  # fmt: skip

    def forward(self, count):
        return self.net(torch.randn(count, self.noise))


def main(steps=120, count=192):
    torch.manual_seed(15)
    generator = Generator()
    optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    for step in range(steps):
        made = generator(count)
        loss = transport(made, spirals(count)) - transport(made[: count // 2], made[count // 2 :]) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: divergence {loss.item():.4f}")


if __name__ == "__main__":
    main()
