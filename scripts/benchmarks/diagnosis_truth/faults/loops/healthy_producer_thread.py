"""Large batches assembled by a thread while the step before computes."""

import queue
import threading

import numpy as np
import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "A thread sorts and stacks the next batch in NumPy within the time of a step, so that no step waits for it.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "evaluation", "growth"],
    "healthy": True,
}


class Producer(threading.Thread):
    def __init__(self, store, batch, count, depth=2):
        super().__init__(daemon=True)
        self.store, self.batch, self.count = store, batch, count
        self.ready = queue.Queue(maxsize=depth)

    def assemble(self, rng):
        rows = rng.integers(0, len(self.store), self.batch)
        x = np.concatenate([self.store[r][None] for r in rows])
        x = (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True)
        return torch.from_numpy(x), torch.from_numpy(np.sort(x.mean(2), 1)[:, -4:].copy())

    def run(self):
        rng = np.random.default_rng(0)
        for _ in range(self.count):
            self.ready.put(self.assemble(rng))
        self.ready.put(None)

    def __iter__(self):
        self.start()
        while (item := self.ready.get()) is not None:
            yield item


class Mixer(nn.Module):
    def __init__(self, length=64, channels=48):
        super().__init__()
        self.stem = nn.Conv1d(channels, 96, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv1d(96, 96, 5, padding=2) for _ in range(3))
        self.head = nn.Linear(96 * length // 4, 4)

    def forward(self, x):
        x = self.stem(x.transpose(1, 2))
        for conv in self.blocks:
            x = x + torch.relu(conv(x))
        return self.head(nn.functional.avg_pool1d(x, 4).flatten(1))


def main():
    torch.manual_seed(0)
    store = np.random.default_rng(1).standard_normal((2000, 64, 48), dtype=np.float32)
    model = Mixer()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for step, (x, y) in enumerate(Producer(store, batch=64, count=36)):
        optimizer.zero_grad()
        loss = nn.functional.huber_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
