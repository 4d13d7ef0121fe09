"""Emulator of a deterministic simulator: an exact Gaussian process over learned features (deep kernel learning)."""

import torch
from torch import nn

CASE = {
    "generation": 8,
    "truth": "The Gaussian process factorises its kernel matrix in double precision, as data without noise demand (in single precision the factorisation fails); the features are computed in single precision.",
    "cause": None,
    "also": [],
    "never": [
        "fp64-products",
        "casts",
        "small-operators",
        "host-python",
        "duplicate-forward",
        "no-update",
        "data-loading",
        "growth",
    ],
    "healthy": True,
}


class DeepKernel(nn.Module):
    def __init__(self, inputs, width=400, features=3):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, features),
        )  # fmt: skip
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        z = self.net(x).double()
        squares = z.square().sum(1)
        distance = squares[:, None] + squares - 2 * z @ z.T
        return self.log_scale.exp() * torch.exp(-0.5 * distance.clamp_min(0.0))


def gradient_of_evidence(kernel, y, jitter=1e-8):
    """Negative log evidence, and its derivative with respect to the kernel matrix in closed form."""
    with torch.no_grad():
        factor = torch.linalg.cholesky(kernel + jitter * torch.eye(len(y), dtype=kernel.dtype))
        inverse = torch.cholesky_inverse(factor)
        weights = torch.cholesky_solve(y[:, None], factor)
        value = 0.5 * (y @ weights).squeeze() + factor.diagonal().log().sum()
        return value, 0.5 * (inverse - weights @ weights.T)


def simulator(x):
    """Steady temperature at a probe, for eight parameters of a furnace."""
    return (
        torch.sin(3 * x[:, 0] + x[:, 1]) + x[:, 2] * x[:, 3] + 0.5 * torch.exp(-(x[:, 4] ** 2)) + 0.2 * x[:, 5:].prod(1)
    )


def main(steps=150, points=220):
    torch.manual_seed(47)
    x = 2 * torch.rand(2000, 8, dtype=torch.float64) - 1
    y = simulator(x)
    y = (y - y.mean()) / y.std()
    model = DeepKernel(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-6, momentum=0.9)
    for step in range(steps):
        pick = torch.randint(len(x), (points,)).unique()
        kernel = model(x[pick].float())
        evidence, gradient = gradient_of_evidence(kernel.detach(), y[pick])
        optimizer.zero_grad()
        kernel.backward(gradient)
        nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step}: negative log evidence per point {evidence.item() / len(pick):.3f}")


if __name__ == "__main__":
    main()
