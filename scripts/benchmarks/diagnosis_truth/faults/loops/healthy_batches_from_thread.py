"""Wear of machines from their sensors; a thread cuts the windows out of the tables and fills a short queue."""

import queue
import threading

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "The thread cuts windows out of arrays and is quicker than the training, so the queue is hardly ever empty; dilated convolutions take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "data-loading",
        "thread-oversubscription",
        "host-python",
        "growth",
        "needless-copies",
        "periodic-pause",
        "start-up",
    ],
    "healthy": True,
}

SENSORS = ["heat", "load", "speed", "hum", "oil", "noise"]


def read_machines(count=12, minutes=3000, seed=16):
    """Return one table per machine, with smoothed sensors and the wear in the last column."""
    rng = np.random.default_rng(seed)
    machines = []
    for _ in range(count):
        frame = pd.DataFrame(rng.standard_normal((minutes, len(SENSORS))), columns=SENSORS)
        frame["load"] = frame["load"].rolling(30, min_periods=1).mean() * 5
        frame["wear"] = (frame["load"].abs() + 0.2 * frame["heat"]).ewm(span=60).mean()
        machines.append((frame - frame.mean()) / frame.std())
    return machines


class WindowThread(threading.Thread):
    """Thread that puts batches into a queue until it has made all of them."""

    def __init__(self, machines, batches, size, length):
        super().__init__(daemon=True)
        self.tables = np.stack([m.to_numpy(np.float32) for m in machines])
        self.batches, self.size, self.length = batches, size, length
        self.queue = queue.Queue(maxsize=4)

    def run(self):
        rng = np.random.default_rng(17)
        for _ in range(self.batches):
            machine = rng.integers(len(self.tables), size=(self.size, 1))
            start = rng.integers(self.tables.shape[1] - self.length, size=(self.size, 1))
            window = self.tables[machine, start + np.arange(self.length)]
            sensors = np.ascontiguousarray(window[:, :, :-1].transpose(0, 2, 1))
            self.queue.put((torch.from_numpy(sensors), torch.from_numpy(window[:, -1, -1].copy())))
        self.queue.put(None)

    def __iter__(self):
        while (batch := self.queue.get()) is not None:
            yield batch


class Residual(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(width, width, 3, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x):
        return x + self.mix(F.relu(self.conv(F.pad(x, (self.pad, 0)))))


class WearModel(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        layers = [Residual(width, 2**i) for i in range(5)]
        self.body = nn.Sequential(nn.Conv1d(len(SENSORS), width, 1), *layers)
        self.head = nn.Linear(width, 1)

    def forward(self, sensors):
        return self.head(self.body(sensors)[:, :, -1]).squeeze(1)


def main(steps=150, size=24, length=128):
    torch.manual_seed(16)
    loader = WindowThread(read_machines(), steps, size, length)
    loader.start()
    model = WearModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, (sensors, wear) in enumerate(loader, 1):
        loss = F.smooth_l1_loss(model(sensors), wear)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.4f}, batches waiting {loader.queue.qsize()}")
    loader.join()


if __name__ == "__main__":
    main()
