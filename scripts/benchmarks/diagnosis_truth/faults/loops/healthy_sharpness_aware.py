"""Plant leaves by sharpness-aware minimisation: each step has two passes, at the weights and at the worst near them."""

import torch
from torch import nn

CASE = {
    "generation": 6,
    "truth": "Two passes per step, the second at shifted weights, are the method; the convolutions of both take the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "repeated-backward",
        "small-operators",
        "host-python",
        "growth",
        "gradients-not-cleared",
    ],
    "healthy": True,
}


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        for p in parameters:
            shift = p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12))
            p.add_(shift)
            self.state[p]["shift"] = shift
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.state[p]["shift"])
        self.base.step()
        self.zero_grad()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def leaves(count, side=48):
    """Ellipses with a number of lobes, which is the label."""
    lobes = torch.randint(3, 8, (count,))
    axis = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle, radius = torch.atan2(y, x), (x**2 + y**2).sqrt()
    edge = 0.6 + 0.2 * torch.cos(lobes.view(-1, 1, 1) * angle + 6 * torch.rand(count, 1, 1))
    return ((radius < edge).float() + 0.3 * torch.randn(count, side, side)).unsqueeze(1), lobes - 3


def main(steps=60, batch=16):
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(1, 24, 5, stride=2, padding=2), Residual(24), Residual(24),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(24 * 16, 5),
    )  # fmt: skip
    optimizer = SAM(net.parameters(), torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for step in range(steps):
        pictures, labels = leaves(batch)
        loss = criterion(net(pictures), labels)
        loss.backward()
        optimizer.climb()
        criterion(net(pictures), labels).backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
