"""Super-resolution of satellite tiles; a second process cuts tiles where the errors are large."""

import multiprocessing
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 6,
    "truth": "The loop asks a process for its tiles and looks every 50 ms if they have come; they are there after a few of these.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging", "checkpoint-writing"],
    "healthy": False,
    "place": ["time.sleep(", "while self.replies.empty()", "self.replies.get()", "server.fetch("],
    "share": 55,
    "remedy": "let replies.get() wait, with a timeout",
    "without": [["        while self.replies.empty():\n            time.sleep(0.05)\n", ""]],
}

TILE, TILES, BATCH, STEPS = 64, 400, 8, 60


def cut_tiles(requests, replies):
    """Server: a blurred landscape in three bands for each seed, as float16 to save bytes."""
    axis = np.fft.fftfreq(TILE)
    falloff = 1 / (0.02 + axis[:, None] ** 2 + axis[None, :] ** 2)
    for seeds in iter(requests.get, None):
        noise = np.stack([np.random.default_rng(seed).standard_normal((3, TILE, TILE)) for seed in seeds])
        land = np.fft.ifft2(np.fft.fft2(noise) * falloff).real
        land /= land.std(axis=(2, 3), keepdims=True)
        replies.put(land.astype(np.float16))


class TileServer:
    """The process that cuts tiles; the tiles of a batch depend on the errors of those before."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.requests, self.replies = context.Queue(), context.Queue()
        self.process = context.Process(target=cut_tiles, args=(self.requests, self.replies), daemon=True)
        self.process.start()

    def fetch(self, seeds):
        self.requests.put(seeds)
        # get() hung once when the server had died, so look first
        while self.replies.empty():
            time.sleep(0.05)
        return torch.from_numpy(self.replies.get().astype(np.float32))

    def close(self):
        self.requests.put(None)
        self.process.join()


class ResidualBlock(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x):
        return x + 0.1 * super().forward(x)


class EDSR(nn.Module):
    def __init__(self, width=20, depth=2, scale=2):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*[ResidualBlock(width) for _ in range(depth)])
        self.tail = nn.Sequential(nn.Conv2d(width, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, x):
        x = self.head(x)
        return self.tail(x + self.body(x))


def main():
    torch.manual_seed(0)
    model = EDSR()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    server, errors = TileServer(), np.ones(TILES)
    rng = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        seeds = rng.choice(TILES, BATCH, replace=False, p=errors / errors.sum())
        sharp = server.fetch(seeds.tolist())
        each = F.l1_loss(model(F.avg_pool2d(sharp, 2)), sharp, reduction="none").mean((1, 2, 3))
        loss = each.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors[seeds] = each.detach().numpy()
        if step % 20 == 0:
            print(f"[{step}/{STEPS}] L1 {loss.item():.4f}")
    server.close()


if __name__ == "__main__":
    main()
