"""Learning shortest paths: a transformer over the nodes of random mazes, which are made by processes."""

# %% imports and settings
import heapq
import multiprocessing
import random
import time
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = {
    "generation": 5,
    "truth": "make_batch opens a pool of two processes for each batch and ends it again, longer than the mazes and the step take.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "with fork.Pool(cfg.processes) as pool",
        "pool.map(solved_maze",
        "mazes, costs = make_batch(",
        "solved = solved_mazes(",
    ],
    "share": 71,
    "remedy": "open the pool once, or make the few mazes of a batch in the main process",
    "without": [
        [
            "    with fork.Pool(cfg.processes) as pool:\n        examples = pool.map(solved_maze, seeds)\n",
            "    examples = map(solved_maze, seeds)\n",
        ]
    ],
}

cfg = SimpleNamespace(side=8, batch=16, width=64, depth=2, heads=4, lr=1e-3, iterations=120, processes=2, seed=7)
fork = multiprocessing.get_context("fork")
torch.manual_seed(cfg.seed)


# %% data
def solved_maze(seed):
    """The costs of a grid's cells, and the cost of the cheapest way from the corner to each of them."""
    rng = random.Random(seed)
    cells = [rng.randint(1, 9) for _ in range(cfg.side**2)]
    best, queue = {0: 0}, [(0, 0)]
    while queue:
        cost, at = heapq.heappop(queue)
        if cost > best[at]:
            continue
        row, column = divmod(at, cfg.side)
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if 0 <= r < cfg.side and 0 <= c < cfg.side:
                to, way = r * cfg.side + c, cost + cells[r * cfg.side + c]
                if way < best.get(to, 1 << 30):
                    best[to] = way
                    heapq.heappush(queue, (way, to))
    return cells, [best[i] for i in range(cfg.side**2)]


def solved_mazes(seeds):
    with fork.Pool(cfg.processes) as pool:
        examples = pool.map(solved_maze, seeds)
    return [*examples]


def make_batch(iteration):
    solved = solved_mazes(range(iteration * cfg.batch, (iteration + 1) * cfg.batch))
    cells, costs = zip(*solved)
    return torch.tensor(cells), torch.tensor(costs, dtype=torch.float32) / 50


# %% model
class PathNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Embedding(10, cfg.width)
        self.place = nn.Parameter(0.02 * torch.randn(cfg.side**2, cfg.width))
        layer = nn.TransformerEncoderLayer(cfg.width, cfg.heads, 3 * cfg.width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, cfg.depth, enable_nested_tensor=False)
        self.readout = nn.Linear(cfg.width, 1)

    def forward(self, cells):
        return self.readout(self.encoder(self.cell(cells) + self.place)).squeeze(-1)


net = PathNet()
opt = torch.optim.RAdam(net.parameters(), lr=cfg.lr)

# %% training
began, curve = time.time(), []
for iteration in range(cfg.iterations):
    mazes, costs = make_batch(iteration)
    opt.zero_grad()
    loss = F.smooth_l1_loss(net(mazes), costs)
    loss.backward()
    opt.step()
    curve.append(loss.item())
    if iteration % 20 == 19:
        print(f"{iteration + 1:5d}  {sum(curve[-20:]) / 20:.4f}  {time.time() - began:.1f} s")
