"""Keyword spotting: spoken commands in a folder of wav files, log spectrograms and a small convolutional net."""

import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 9,
    "truth": "The dataset lists the whole folder and sorts it for every single item that it reads.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": [
        "logging",
        "evaluation",
        "growth",
        "start-up",
        "padding",
        "no-update",
        "small-operators",
        "checkpoint-writing",
    ],
    "healthy": False,
    "place": ['path = sorted(self.folder.glob("*.wav"))[index]', "def __getitem__(self, index):"],
    "share": 44,
    "remedy": "list and sort the files once in __init__ and index that list",
    "without": [
        [
            "        self.folder = Path(folder)\n",
            '        self.folder = Path(folder)\n        self.paths = sorted(self.folder.glob("*.wav"))\n',
        ],
        ['        path = sorted(self.folder.glob("*.wav"))[index]\n', "        path = self.paths[index]\n"],
    ],
}

COMMANDS = ["yes", "no", "up", "down", "left", "right"]


def record(folder, count, samples=8000, rate=8000):
    """Each command is a pair of tones; the speaker shifts them and the room adds noise."""
    rng = np.random.default_rng(4)
    time = np.arange(samples) / rate
    for number in range(count):
        label = number % len(COMMANDS)
        pitch = rng.uniform(0.9, 1.1)
        tone = np.sin(2 * np.pi * 300 * (1 + label / 3) * pitch * time)
        tone += np.sin(2 * np.pi * 900 * (1 + label / 5) * pitch * time)
        loud = np.exp(-((time - rng.uniform(0.3, 0.7)) ** 2) / 0.02)
        sound = 0.3 * tone * loud + 0.1 * rng.standard_normal(samples)
        with wave.open(str(Path(folder) / f"{COMMANDS[label]}_{number:04d}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())


class SpeechCommands(Dataset):
    def __init__(self, folder):
        self.folder = Path(folder)
        self.count = len(list(self.folder.glob("*.wav")))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        path = sorted(self.folder.glob("*.wav"))[index]
        with wave.open(str(path), "rb") as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        sound = torch.from_numpy(samples.astype(np.float32) / 32768)
        return sound, COMMANDS.index(path.stem.split("_")[0])


class Spotter(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        self.register_buffer("window", torch.hann_window(256))
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 5, 2, 2), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, 1, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d((8, 1)), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * width, classes),
        )  # fmt: skip

    def forward(self, sound):
        spectrum = torch.stft(sound, 256, 128, window=self.window, return_complex=True).abs()
        return self.net(torch.log(spectrum + 1e-4).unsqueeze(1))


def train(folder, epochs=3, batch=8):
    torch.manual_seed(0)
    loader = DataLoader(SpeechCommands(folder), batch_size=batch, shuffle=True, drop_last=True)
    model = Spotter(len(COMMANDS))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        right, total = 0, 0.0
        for sound, label in loader:
            optimizer.zero_grad()
            output = model(sound)
            loss = F.cross_entropy(output, label)
            loss.backward()
            optimizer.step()
            total += loss.item()
            right += (output.argmax(1) == label).sum().item()
        print(f"epoch {epoch}: loss {total / len(loader):.3f} accuracy {right / len(loader) / batch:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(folder, count=320)
        train(folder)
