"""Time series aligned by soft dynamic time warping, a function with its own gradient."""

import math

import numpy as np
import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "Forward and backward of the custom function fill a table of alignments cell by cell in Python: nearly all of the time.",
    "cause": "host-python",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "for j in range(1, m + 1)",
        "for j in range(m, 0, -1)",
        "R[i][j] = ",
        "E[i][j] = ",
        "least = ",
        "a, b, c = ",
        "down = ",
        "right = ",
        "both = ",
        "SoftDTW.apply(",
        "return SoftDTW",
        "loss.backward()",
    ],
    "share": None,
    "remedy": "compute each anti-diagonal of the table at once for the whole batch",
    "without": [],
}


class SoftDTW(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cost, gamma):
        n, m = cost.shape
        D = cost.tolist()
        R = [[math.inf] * (m + 2) for _ in range(n + 2)]
        R[0][0] = 0.0
        for i in range(1, n + 1):
            for j in range(1, m + 1):
                a, b, c = R[i - 1][j - 1], R[i - 1][j], R[i][j - 1]
                least = min(a, b, c)
                total = math.exp((least - a) / gamma) + math.exp((least - b) / gamma) + math.exp((least - c) / gamma)
                R[i][j] = D[i - 1][j - 1] + least - gamma * math.log(total)
        ctx.table, ctx.costs, ctx.gamma = R, D, gamma
        return cost.new_tensor(R[n][m])

    @staticmethod
    def backward(ctx, gradient):
        R, D, gamma = ctx.table, ctx.costs, ctx.gamma
        n, m = len(D), len(D[0])
        E = np.zeros((n + 2, m + 2)).tolist()
        E[n][m] = 1.0
        for i in range(n, 0, -1):
            for j in range(m, 0, -1):
                if (i, j) == (n, m):
                    continue
                down = right = both = 0.0
                if i < n:
                    down = E[i + 1][j] * math.exp((R[i + 1][j] - R[i][j] - D[i][j - 1]) / gamma)
                if j < m:
                    right = E[i][j + 1] * math.exp((R[i][j + 1] - R[i][j] - D[i - 1][j]) / gamma)
                if i < n and j < m:
                    both = E[i + 1][j + 1] * math.exp((R[i + 1][j + 1] - R[i][j] - D[i][j]) / gamma)
                E[i][j] = down + right + both
        return gradient * torch.tensor([row[1 : m + 1] for row in E[1 : n + 1]]), None


def alignment(x, y, gamma=1.0):
    return SoftDTW.apply(torch.cdist(x, y).square(), gamma)


class Decoder(nn.Module):
    def __init__(self, length=40):
        super().__init__()
        self.length = length
        self.net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, length * 3))

    def forward(self, code):
        return self.net(code).view(len(code), self.length, 3)


def main():
    torch.manual_seed(0)
    decoder = Decoder()
    optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    codes = torch.randn(64, 16)
    phase = codes[:, :1, None]
    curves = torch.sin(torch.linspace(0, 6, 40)[None, :, None] + phase * torch.tensor([1.0, 0.7, 0.3]))
    for step in range(50):
        rows = torch.randint(0, 64, (8,))
        made = decoder(codes[rows])
        loss = torch.stack([alignment(x, y) for x, y in zip(made, curves[rows], strict=True)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} soft-DTW {loss.item():.3f}")


if __name__ == "__main__":
    main()
