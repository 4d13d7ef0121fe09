"""Commands heard in rooms: a small network names the spoken word although a room's echo covers it."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 17,
    "truth": "The dataset puts each recording into a room with np.convolve, which multiplies each of 8000 samples by each of 2400 of the echo; a product of Fourier transforms gives the same: 48% of the loop's time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "dense-gradient", "padding"],
    "healthy": False,
    "place": [
        "wet = np.convolve(sound, echo)[: len(sound)]",
        "sound = self.reverb(self.sounds[index])",
        "for sounds, words in loader:",
    ],
    "share": 48,
    "remedy": "convolve with scipy.signal.fftconvolve or np.fft.rfft and irfft",
    "without": [
        [
            "wet = np.convolve(sound, echo)[: len(sound)]",
            "size = 10800\n"
            "        wet = np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(echo, size), size)[: len(sound)]",
        ],
    ],
}

RATE, WORDS = 8000, 12


class Commands(Dataset):
    """Words are chirps between two pitches; rooms are noise that fades."""

    def __init__(self, count, rooms=40, tail=0.3):
        self.rng = np.random.default_rng(71)
        time = np.arange(RATE) / RATE
        self.words = self.rng.integers(0, WORDS, count)
        low, high = 200 + 60 * (self.words % 4), 400 + 250 * (self.words // 4)
        pitch = low[:, None] + (high - low)[:, None] * time * self.rng.uniform(0.8, 1.2, (count, 1))
        self.sounds = np.sin(2 * np.pi * np.cumsum(pitch, 1) / RATE).astype(np.float32)
        length = int(tail * RATE)
        fade = np.exp(-np.arange(length) / RATE / self.rng.uniform(0.02, 0.1, (rooms, 1)))
        self.echoes = (self.rng.normal(size=(rooms, length)) * fade).astype(np.float32)
        self.echoes[:, 0] = 3

    def __len__(self):
        return len(self.sounds)

    def reverb(self, sound):
        echo = self.echoes[self.rng.integers(len(self.echoes))]
        wet = np.convolve(sound, echo)[: len(sound)]
        return (wet / np.abs(wet).max()).astype(np.float32)

    def __getitem__(self, index):
        sound = self.reverb(self.sounds[index])
        sound += self.rng.normal(0, 0.05, len(sound)).astype(np.float32)
        return torch.from_numpy(sound), int(self.words[index])


class WordNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.register_buffer("window", torch.hann_window(256))
        self.layers = nn.Sequential(
            nn.Conv1d(129, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2), nn.BatchNorm1d(2 * width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, sounds):
        spectra = torch.stft(sounds, 256, hop_length=128, window=self.window, return_complex=True)
        return self.head(self.layers(torch.log1p(spectra.abs())).mean(2))


def main(epochs=4):
    torch.manual_seed(71)
    loader = DataLoader(Commands(640), batch_size=16, shuffle=True, drop_last=True)
    model = WordNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    for epoch in range(epochs):
        right = seen = 0
        for sounds, words in loader:
            scores = model(sounds)
            loss = F.cross_entropy(scores, words)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == words).sum().item()
            seen += len(words)
        print(f"epoch {epoch}: {right / seen:.1%} right")


if __name__ == "__main__":
    main()
