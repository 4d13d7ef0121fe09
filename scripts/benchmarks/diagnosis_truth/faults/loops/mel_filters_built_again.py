"""Spoken commands from mel spectrograms, with a small convolutional network."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 15,
    "truth": "The triangular mel filters, which never change, are filled in Python loops over the frequencies for each clip: 33% of the loop's time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "layout-conversion", "no-update"],
    "healthy": False,
    "place": [
        "bank[m - 1, k] = (k - edges[m - 1]) / (edges[m] - edges[m - 1])",
        "bank[m - 1, k] = (edges[m + 1] - k) / (edges[m + 1] - edges[m])",
        "def mel_filters(filters=64):",
        "return np.log(power @ mel_filters().T + 1e-6)",
        "features = log_mel(wave)",
    ],
    "share": 33,
    "remedy": "build the filters once, as a constant or an attribute of the dataset",
    "without": [
        ["def mel_filters(filters=64):\n", "@__import__('functools').cache\ndef mel_filters(filters=64):\n"],
    ],
}

RATE, WINDOW, HOP, WORDS = 16000, 2048, 512, 8


def mel_filters(filters=64):
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    mels = np.linspace(0, top, filters + 2)
    hertz = 700 * (10 ** (mels / 2595) - 1)
    edges = np.floor((WINDOW + 1) * hertz / RATE).astype(int)
    bank = np.zeros((filters, WINDOW // 2 + 1))
    for m in range(1, filters + 1):
        for k in range(edges[m - 1], edges[m]):
            bank[m - 1, k] = (k - edges[m - 1]) / (edges[m] - edges[m - 1])
        for k in range(edges[m], edges[m + 1]):
            bank[m - 1, k] = (edges[m + 1] - k) / (edges[m + 1] - edges[m])
    return bank


def log_mel(wave):
    frames = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), axis=1)) ** 2
    return np.log(power @ mel_filters().T + 1e-6)


class Commands(Dataset):
    def __init__(self, count, seed=6):
        rng = np.random.default_rng(seed)
        self.words = rng.integers(0, WORDS, count)
        time = np.arange(RATE) / RATE
        pitch = 150 + 90 * self.words[:, None] + 20 * rng.standard_normal((count, 1))
        self.waves = np.sin(2 * np.pi * pitch * time * (1 + 0.3 * time * (self.words[:, None] % 3)))
        self.waves = (self.waves + 0.5 * rng.standard_normal((count, RATE))).astype(np.float32)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        wave = np.roll(self.waves[index], np.random.randint(-1600, 1600)) * np.random.uniform(0.7, 1.3)
        features = log_mel(wave)
        features = (features - features.mean()) / (features.std() + 1e-5)
        return torch.from_numpy(features.astype(np.float32))[None], int(self.words[index])


class Listener(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, features):
        return self.head(self.body(features).mean((2, 3)))


def main(epochs=5):
    torch.manual_seed(6)
    np.random.seed(6)
    loader = DataLoader(Commands(400), batch_size=16, shuffle=True)
    model = Listener()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        hits = 0
        for features, words in loader:
            logits = model(features)
            loss = F.cross_entropy(logits, words)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += (logits.argmax(1) == words).sum().item()
        print(f"epoch {epoch}: accuracy {hits / len(loader.dataset):.3f}")


if __name__ == "__main__":
    main()
