"""A network that fulfils the Euler equations of a gas in two dimensions."""

import time

import torch
from torch import nn

CASE = {
    "truth": "Each of the twelve partial derivatives calls autograd.grad, which computes the derivatives by x, y and t "
    "at once, and keeps one of them: four calls would do. Measured: 60%.",
    "cause": "repeated-backward",
    "also": ["elementwise-chain", "activations"],
    "never": ["data-loading", "host-sync", "launch-bound", "fp64-products", "logging", "exposed-copies"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["torch.autograd.grad("],
}

STEPS = 50
POINTS = 32768
WIDTH = 512
LAYERS = 4
GAMMA = 1.4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")


class Network(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        sizes = [3, *[width] * layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.last = nn.Linear(width, 4)

    def forward(self, points):
        x = points
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.last(x)


def derivative(field, points, axis):
    (gradient,) = torch.autograd.grad(field.sum(), points, create_graph=True)
    return gradient[:, axis]


def residuals(network, points):
    """Mass, both momenta and pressure; x, y and t are the axes 0, 1 and 2."""
    rho, u, v, p = network(points).unbind(1)
    rho, p = rho + 1.0, p + 1.0
    rho_x, rho_y, rho_t = (derivative(rho, points, axis) for axis in range(3))
    u_x, u_y, u_t = (derivative(u, points, axis) for axis in range(3))
    v_x, v_y, v_t = (derivative(v, points, axis) for axis in range(3))
    p_x, p_y, p_t = (derivative(p, points, axis) for axis in range(3))
    divergence = u_x + v_y
    mass = rho_t + u * rho_x + v * rho_y + rho * divergence
    momentum_x = rho * (u_t + u * u_x + v * u_y) + p_x
    momentum_y = rho * (v_t + u * v_x + v * v_y) + p_y
    energy = p_t + u * p_x + v * p_y + GAMMA * p * divergence
    return mass, momentum_x, momentum_y, energy


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
network = Network(WIDTH, LAYERS).to(device)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    points = torch.rand(POINTS, 3, device=device).requires_grad_()
    physics = sum(residual.square().mean() for residual in residuals(network, points))
    begin = torch.cat([torch.rand(POINTS // 8, 2, device=device), torch.zeros(POINTS // 8, 1, device=device)], 1)
    wanted = torch.sin(2 * torch.pi * begin[:, :1]) * torch.ones(1, 4, device=device) * 0.1
    loss = physics + 10 * (network(begin) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
elapsed = clock() - start
print(f"loss {loss.item():.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
