"""Contrastive learning on windows of wrist accelerometers; a text board shows how the losses are spread."""

import threading
import time
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "A background thread draws the board over and over in pure Python; it holds the interpreter's lock while it does, and the training thread waits for the lock after each operator.",
    "cause": "host-python",
    "also": ["logging"],
    "never": ["data-loading", "evaluation", "no-update", "start-up", "padding", "thread-oversubscription", "casts"],
    "healthy": False,
    "place": ["def draw(", "for value in values", "self.draw()", "time.sleep(self.every)", "sorted(self.values)"],
    "share": 50,
    "remedy": "draw the board in the training loop every hundred steps, or once a second, from a histogram made by tensors",
    "without": [
        ["        self.thread.start()\n", "        pass\n"],
        ["        self.thread.join()\n", "        pass\n"],
    ],
}


class Board:
    def __init__(self, keep=6000, bins=40, every=0.002):
        self.values = deque(maxlen=keep)
        self.bins, self.every = bins, every
        self.text = ""
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.finished.set()
        self.thread.join()

    def add(self, losses):
        self.values.extend(losses.tolist())

    def draw(self):
        values = sorted(self.values)
        if not values:
            return
        low, high = values[0], values[-1] + 1e-6
        bars = [0] * self.bins
        for value in values:
            bars[int((value - low) / (high - low) * self.bins)] += 1
        tallest = max(bars)
        rows = ["".join("#" if bar * 8 > tallest * level else " " for bar in bars) for level in range(7, -1, -1)]
        self.text = "\n".join(rows) + f"\n{low:.2f} .. median {values[len(values) // 2]:.2f} .. {high:.2f}"

    def run(self):
        while not self.finished.is_set():
            self.draw()
            time.sleep(self.every)


class Encoder(nn.Module):
    def __init__(self, channels=3, width=48, dim=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(channels, width, 7, 2, 3), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU(),
        )  # fmt: skip
        self.project = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, dim))

    def forward(self, x):
        return F.normalize(self.project(self.net(x).mean(2)), dim=1)


def movements(count, length=128):
    t = torch.arange(length) / 50
    rate = 0.5 + 4 * torch.rand(count, 1, 1)
    return torch.sin(6.28 * rate * t + 6.28 * torch.rand(count, 3, 1)) * torch.rand(count, 3, 1)


def view(x):
    scale = 0.8 + 0.4 * torch.rand(len(x), 3, 1)
    return torch.roll(x, int(torch.randint(x.shape[2], ())), 2) * scale + 0.1 * torch.randn_like(x)


def nt_xent(a, b, temperature=0.2):
    z = torch.cat([a, b])
    logits = z @ z.t() / temperature
    logits.fill_diagonal_(-1e9)
    n = len(a)
    partner = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(logits, partner, reduction="none")


def main(steps=200, batch=64):
    torch.manual_seed(2)
    windows = movements(4000)
    encoder = Encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    with Board() as board:
        for step in range(steps):
            x = windows[torch.randint(len(windows), (batch,))]
            losses = nt_xent(encoder(view(x)), encoder(view(x)))
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            board.add(losses.detach())
            if step % 50 == 49:
                print(f"step {step + 1}\n{board.text}")


if __name__ == "__main__":
    main()
