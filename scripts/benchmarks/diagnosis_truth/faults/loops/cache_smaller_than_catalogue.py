"""Earthquake or blast? A small CNN on spectrograms of seismograms, which are kept once they are computed."""

from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 10,
    "truth": "lru_cache keeps 128 spectrograms by default, but an epoch passes 640 recordings: four of five look-ups miss, and the spectrogram is computed again.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["logging", "evaluation", "growth", "no-update", "start-up", "padding", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "@lru_cache",
        "def spectrogram(",
        "np.fft.rfft",
        "spectrogram(self.numbers[i])",
        "for pictures, kinds in loader",
    ],
    "share": 68,
    "remedy": "lru_cache(maxsize=None), or compute all spectrograms once before training",
    "without": [["@lru_cache\n", "@lru_cache(maxsize=None)\n"]],
}

RATE = 100


def seismogram(number, seconds=70):
    rng = np.random.default_rng(number)
    t = np.arange(seconds * RATE) / RATE
    blast = number % 2
    p = 5 + 3 * rng.random()
    s = p + (1.5 if blast else 5) + 2 * rng.random()
    trace = 0.05 * rng.standard_normal(len(t))
    for onset, size, pitch in ((p, 1.0, 8 + 4 * blast), (s, 0.4 if blast else 1.6, 4 + rng.random())):
        after = np.clip(t - onset, 0, None)
        trace += size * (t > onset) * np.exp(-after / 4) * np.sin(6.28 * pitch * after) * rng.uniform(0.5, 1.5)
    return trace.astype(np.float32)


TRACES = {}


@lru_cache
def spectrogram(number, window=256, hop=14, group=4):
    trace = TRACES[number]
    starts = np.arange(0, len(trace) - window, hop)
    frames = np.stack([trace[a : a + window] for a in starts]) * np.hanning(window)
    power = np.abs(np.fft.rfft(frames)) ** 2
    power = power[: len(power) // group * group, :64].reshape(-1, group, 64).mean(1)
    picture = np.log10(power.T + 1e-4)
    picture = (picture - picture.mean()) / picture.std()
    return torch.from_numpy(picture.astype(np.float32))[None]


class Events(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return spectrogram(self.numbers[i]), self.numbers[i] % 2


def classifier(width=8):
    return nn.Sequential(
        nn.Conv2d(1, width, 5, 2, 2), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, 2),
    )  # fmt: skip


def main(recordings=640, batch=16, epochs=5):
    torch.manual_seed(4)
    for number in range(recordings):
        TRACES[number] = seismogram(number)
    loader = DataLoader(Events(list(range(recordings))), batch_size=batch, shuffle=True)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        right = 0
        for pictures, kinds in loader:
            logits = model(pictures)
            loss = criterion(logits, kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(1) == kinds).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {right / recordings:.1%} right")


if __name__ == "__main__":
    main()
