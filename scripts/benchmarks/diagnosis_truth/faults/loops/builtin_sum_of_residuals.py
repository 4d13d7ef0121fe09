"""Heat in a rod: a neural net solves the equation and finds the rod's unknown conductivity from a few sensors."""

import math

import torch
from torch import nn

CASE = {
    "generation": 9,
    "truth": "The losses call Python's own sum() on tensors, which adds up one element after the other, each an operator with its node in the graph.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "start-up",
        "padding",
        "no-update",
        "dense-gradient",
    ],
    "healthy": False,
    "place": ["return sum(values**2) / len(values)"],
    "share": 61,
    "remedy": "use the tensor's own (values**2).mean()",
    "without": [["    return sum(values**2) / len(values)\n", "    return (values**2).mean()\n"]],
}


class Field(nn.Module):
    def __init__(self, width=40, depth=3):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        self.log_conductivity = nn.Parameter(torch.tensor(0.0))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


def derivative(output, variable):
    return torch.autograd.grad(output, variable, torch.ones_like(output), create_graph=True)[0]


def heat_residual(field, x, t):
    x.requires_grad_(True)
    t.requires_grad_(True)
    u = field(x, t)
    u_t = derivative(u, t)
    u_xx = derivative(derivative(u, x), x)
    return u_t - field.log_conductivity.exp() * u_xx


def squared(values):
    return sum(values**2) / len(values)


def exact(x, t, conductivity):
    return torch.exp(-conductivity * math.pi**2 * t) * torch.sin(math.pi * x)


def main():
    torch.manual_seed(2)
    conductivity = 0.3
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=2e-3)
    sensors_x, sensors_t = torch.rand(128, 1), torch.rand(128, 1)
    measured = exact(sensors_x, sensors_t, conductivity) + 0.01 * torch.randn(128, 1)
    for step in range(120):
        x, t = torch.rand(1024, 1), torch.rand(1024, 1)
        ends = torch.randint(2, (128, 1)).float()
        start = torch.rand(128, 1)
        zero = torch.zeros(128, 1)

        physics = squared(heat_residual(field, x, t))
        boundary = squared(field(ends, torch.rand(128, 1)))
        initial = squared(field(start, zero) - exact(start, zero, conductivity))
        data = squared(field(sensors_x, sensors_t) - measured)
        loss = physics + 10 * boundary + 10 * initial + 10 * data

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            found = field.log_conductivity.exp().item()
            print(f"step {step}: loss {loss.item():.4f}, conductivity {found:.3f}")


main()
