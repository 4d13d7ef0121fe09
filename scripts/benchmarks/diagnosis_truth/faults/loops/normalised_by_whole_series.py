"""Anomaly detection for a machine's sensors: an autoencoder reconstructs windows of a long recording."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 8,
    "truth": "The dataset's __getitem__ normalises the whole recording, with its mean and deviation, for each single window that it returns.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["evaluation", "growth", "logging", "small-operators", "padding", "start-up"],
    "healthy": False,
    "place": [
        "(self.recording - self.recording.mean(axis=0)) / (self.recording.std(axis=0)",
        "def __getitem__",
        "for window in loader",
    ],
    "share": 58,
    "remedy": "normalise the recording once in __init__",
    "without": [
        [
            "        self.recording = recording\n",
            "        self.recording = (recording - recording.mean(axis=0)) / (recording.std(axis=0) + 1e-6)\n",
        ],
        [
            "        scaled = (self.recording - self.recording.mean(axis=0)) / (self.recording.std(axis=0) + 1e-6)\n",
            "        scaled = self.recording\n",
        ],
    ],
}


class SensorWindows(Dataset):
    def __init__(self, recording, length=96, stride=16):
        self.recording = recording
        self.length, self.stride = length, stride

    def __len__(self):
        return (len(self.recording) - self.length) // self.stride

    def __getitem__(self, i):
        scaled = (self.recording - self.recording.mean(axis=0)) / (self.recording.std(axis=0) + 1e-6)
        start = i * self.stride
        return torch.from_numpy(scaled[start : start + self.length].T.copy())


class ConvAutoencoder(nn.Module):
    def __init__(self, sensors, width=48):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(sensors, width, 7, stride=2, padding=3), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, 8, 3, padding=1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(8, width, 4, stride=2, padding=1), nn.BatchNorm1d(width), nn.ReLU(),
            nn.ConvTranspose1d(width, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv1d(width, sensors, 5, padding=2),
        )  # fmt: skip

    def forward(self, x):
        return self.decoder(self.encoder(x))


def record(minutes=4000, sensors=12, seed=3):
    rng = np.random.default_rng(seed)
    t = np.arange(minutes)[:, None]
    period = rng.uniform(20, 200, sensors)
    values = rng.uniform(1, 50, sensors) * np.sin(2 * np.pi * t / period + rng.uniform(0, 6, sensors))
    return (values + rng.uniform(-100, 100, sensors) + rng.normal(size=values.shape)).astype(np.float32)


def train(model, loader, epochs, device="cpu"):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.SmoothL1Loss()
    for epoch in range(epochs):
        model.train()
        losses = []
        for window in loader:
            window = window.to(device)
            loss = criterion(model(window), window)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"[{epoch + 1}/{epochs}] reconstruction {np.mean(losses):.4f}")


def main():
    torch.manual_seed(3)
    dataset = SensorWindows(record())
    loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
    train(ConvAutoencoder(sensors=12), loader, epochs=14)


if __name__ == "__main__":
    main()
