"""Radio channels from pilots: a network of complex numbers that works on frequencies."""

import torch
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Weights and activations are complex on purpose; each step draws new channels, and complex products take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "casts",
        "fp64-products",
        "needless-copies",
        "layout-conversion",
        "data-loading",
        "divergence",
        "small-operators",
        "elementwise-chain",
        "broadcast-loss",
        "growth",
    ],
    "healthy": True,
}

CARRIERS, ANTENNAS = 64, 4


def channels(count, paths=5):
    """Return the true response of channels with a few paths, and what is received at noisy pilots."""
    delay = torch.rand(count, paths, 1) * 0.2
    gain = torch.randn(count, paths, ANTENNAS, dtype=torch.cfloat) / paths**0.5
    phase = torch.polar(torch.ones(()), -6.2832 * delay * torch.arange(CARRIERS))
    response = (phase.transpose(1, 2) @ gain).flatten(1)
    return response + 0.5 * torch.randn_like(response), response


class ComplexLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, dtype=torch.cfloat) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.cfloat))

    def forward(self, x):
        return x @ self.weight.T + self.bias


class ModReLU(nn.Module):
    """Activation that shrinks the length of each number, and keeps its direction."""

    def __init__(self, width):
        super().__init__()
        self.edge = nn.Parameter(torch.full((width,), -0.1))

    def forward(self, x):
        length = x.abs()
        return x * (torch.relu(length + self.edge) / (length + 1e-6))


def make_net(width=384):
    size = CARRIERS * ANTENNAS
    return nn.Sequential(
        ComplexLinear(size, width),
        ModReLU(width),
        ComplexLinear(width, width),
        ModReLU(width),
        ComplexLinear(width, size),
    )


def main(steps=100, batch=128):
    torch.manual_seed(72)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(1, steps + 1):
        pilots, response = channels(batch)
        rest = net(pilots) - response
        loss = (rest.real.square() + rest.imag.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(
                f"step {step}: error {loss.item():.4f}, of the pilots {(pilots - response).abs().square().mean():.4f}"
            )


if __name__ == "__main__":
    main()
