"""Physics-informed network for the two coupled Burgers' equations in the plane."""

import math

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Six first derivatives are asked for one by one, each with its own backward pass through the whole network; two passes give them all, as one pass gives the derivatives to x, y and t together.",
    "cause": "repeated-backward",
    "also": ["small-operators"],
    "never": ["data-loading", "host-python", "growth", "start-up", "logging", "no-update", "evaluation"],
    "healthy": False,
    "place": [
        "u_x, u_y, u_t = d(u, x), d(u, y), d(u, t)",
        "v_x, v_y, v_t = d(v, x), d(v, y), d(v, t)",
        "return torch.autograd.grad(of, to, torch.ones_like(of), create_graph=True)[0]",
        "loss = residual() + 10 * initial()",
    ],
    "share": 32,
    "remedy": "ask for all three derivatives of u in one call of autograd.grad, and so for v",
    "without": [
        [
            "u_x, u_y, u_t = d(u, x), d(u, y), d(u, t)",
            "u_x, u_y, u_t = torch.autograd.grad(u.sum(), (x, y, t), create_graph=True)",
        ],
        [
            "v_x, v_y, v_t = d(v, x), d(v, y), d(v, t)",
            "v_x, v_y, v_t = torch.autograd.grad(v.sum(), (x, y, t), create_graph=True)",
        ],
    ],
}


def network(sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def d(of, to):
    return torch.autograd.grad(of, to, torch.ones_like(of), create_graph=True)[0]


def problem(net, points, viscosity):
    def fields(x, y, t):
        u, v = net(torch.cat([x, y, t], 1)).split(1, 1)
        return u, v

    def residual():
        x, y, t = (torch.rand(points, 1, requires_grad=True) for _ in range(3))
        u, v = fields(x, y, t)
        u_x, u_y, u_t = d(u, x), d(u, y), d(u, t)
        v_x, v_y, v_t = d(v, x), d(v, y), d(v, t)
        f = u_t + u * u_x + v * u_y - viscosity * (d(u_x, x) + d(u_y, y))
        g = v_t + u * v_x + v * v_y - viscosity * (d(v_x, x) + d(v_y, y))
        return f.square().mean() + g.square().mean()

    def initial():
        x, y = torch.rand(points, 1), torch.rand(points, 1)
        u, v = fields(x, y, torch.zeros(points, 1))
        wave = torch.sin(math.pi * x) * torch.sin(math.pi * y)
        return (u - wave).square().mean() + (v - 0.5 * wave).square().mean()

    return residual, initial


def main():
    torch.manual_seed(4)
    net = network([3, 96, 96, 96, 96, 2])
    residual, initial = problem(net, points=512, viscosity=0.02)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    for iteration in range(1, 61):
        optimizer.zero_grad()
        loss = residual() + 10 * initial()
        loss.backward()
        optimizer.step()
        if iteration % 20 == 0:
            print("It: %d, loss: %.3e" % (iteration, loss.item()))


main()
