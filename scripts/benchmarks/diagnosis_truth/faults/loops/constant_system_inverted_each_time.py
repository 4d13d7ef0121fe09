"""A controller learns to heat a metal plate to a wanted pattern, through a simulator of heat flow that is differentiated."""

import torch
from torch import nn

CASE = {
    "generation": 10,
    "truth": "The matrix of the implicit time step never changes, but its inverse is computed again at each of the simulated instants of each training step.",
    "cause": "decompositions",
    "also": [],
    "never": ["data-loading", "logging", "evaluation", "growth", "host-python", "no-update", "start-up", "padding"],
    "healthy": False,
    "place": ["torch.linalg.inv(", "self.plate.advance(", "plate.advance("],
    "share": 45,
    "remedy": "invert or factorise the matrix once in the constructor",
    "without": [
        [
            "        self.identity = torch.eye(side * side)\n",
            "        self.identity = torch.eye(side * side)\n        self.inverse = torch.linalg.inv(self.identity + self.dt * self.stiffness)\n",
        ],
        [
            "        inverse = torch.linalg.inv(self.identity + self.dt * self.stiffness)\n",
            "        inverse = self.inverse\n",
        ],
    ],
}


class Plate:
    """Heat equation on a square grid, implicit in time; some cells hold a heater each."""

    def __init__(self, side=14, heaters=16, dt=0.4, loss_to_air=0.05):
        self.dt = dt
        line = torch.diag(torch.full((side,), 2.0))
        line -= torch.diag(torch.ones(side - 1), 1) + torch.diag(torch.ones(side - 1), -1)
        line[0, 0] = line[-1, -1] = 1.0
        eye = torch.eye(side)
        self.stiffness = torch.kron(line, eye) + torch.kron(eye, line) + loss_to_air * torch.eye(side * side)
        self.identity = torch.eye(side * side)
        cells = torch.linspace(0, side * side - 1, heaters).long()
        self.inlet = torch.zeros(heaters, side * side)
        self.inlet[torch.arange(heaters), cells] = 1.0

    def advance(self, heat, power):
        inverse = torch.linalg.inv(self.identity + self.dt * self.stiffness)
        return (heat + self.dt * power @ self.inlet) @ inverse


class Controller(nn.Module):
    def __init__(self, cells, heaters, width=192):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 * cells, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, heaters)
        )

    def forward(self, heat, wanted):
        return 6 * torch.sigmoid(self.net(torch.cat([heat, wanted], 1)))


def wanted_patterns(count, side):
    axis = torch.linspace(0, 1, side)
    centre = torch.rand(count, 2, 1, 1)
    distance = (axis[:, None] - centre[:, 0]) ** 2 + (axis[None, :] - centre[:, 1]) ** 2
    return (0.5 + torch.exp(-distance / 0.15)).flatten(1)


class Training:
    def __init__(self, side=14, heaters=16, horizon=10):
        self.plate = Plate(side, heaters)
        self.controller = Controller(side * side, heaters)
        self.optimizer = torch.optim.Adam(self.controller.parameters(), lr=1e-3)
        self.side, self.horizon = side, horizon

    def rollout(self, wanted):
        heat = torch.zeros_like(wanted)
        cost = 0.0
        for t in range(self.horizon):
            power = self.controller(heat, wanted)
            heat = self.plate.advance(heat, power)
            cost = cost + (t + 1) / self.horizon * (heat - wanted).square().mean() + 1e-4 * power.square().mean()
        return cost / self.horizon

    def step(self, batch):
        cost = self.rollout(wanted_patterns(batch, self.side))
        self.optimizer.zero_grad()
        cost.backward()
        self.optimizer.step()
        return cost.detach()


if __name__ == "__main__":
    torch.manual_seed(12)
    training = Training()
    for step in range(200):
        cost = training.step(batch=64)
        if step % 40 == 0:
            print(f"step {step:3d}  cost {cost:.4f}")
