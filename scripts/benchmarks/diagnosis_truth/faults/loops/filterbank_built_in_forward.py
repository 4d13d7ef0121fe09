"""Keyword spotting: the network takes waveforms and computes its log-mel features itself."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 6,
    "truth": "The front end builds its mel filters in each forward pass, number by number in plain Python, although they never change.",
    "cause": "host-python",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "mel_filters(",
        "rows.append(",
        "row.append(",
        "for k in range(bins)",
        "frequency = ",
        "edges = ",
        "rising = ",
        "falling = ",
        "return torch.tensor(rows)",
        "mel_to_hz(",
    ],
    "share": 47,
    "remedy": "build the filters once in __init__ and keep them as a buffer",
    "without": [
        [
            "        self.n_fft, self.hop, self.n_mels, self.rate = n_fft, hop, n_mels, rate\n",
            "        self.n_fft, self.hop, self.n_mels, self.rate = n_fft, hop, n_mels, rate\n"
            "        self.filters = mel_filters(n_mels, n_fft // 2 + 1, rate)\n",
        ],
        [
            "        filters = mel_filters(self.n_mels, self.n_fft // 2 + 1, self.rate).to(wave.device)\n",
            "        filters = self.filters\n",
        ],
    ],
}


def hz_to_mel(f):
    return 2595.0 * math.log10(1.0 + f / 700.0)


def mel_to_hz(m):
    return 700.0 * (10.0 ** (m / 2595.0) - 1.0)


def mel_filters(n_mels, bins, rate):
    top = hz_to_mel(rate / 2)
    edges = [mel_to_hz(top * i / (n_mels + 1)) for i in range(n_mels + 2)]
    rows = []
    for left, centre, right in zip(edges, edges[1:], edges[2:]):
        row = []
        for k in range(bins):
            frequency = k * rate / 2 / (bins - 1)
            rising = (frequency - left) / (centre - left)
            falling = (right - frequency) / (right - centre)
            row.append(max(0.0, min(rising, falling)))
        rows.append(row)
    return torch.tensor(rows)


class LogMel(nn.Module):
    def __init__(self, n_fft=512, hop=160, n_mels=64, rate=16000):
        super().__init__()
        self.n_fft, self.hop, self.n_mels, self.rate = n_fft, hop, n_mels, rate
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wave):
        spectrum = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True).abs().square()
        filters = mel_filters(self.n_mels, self.n_fft // 2 + 1, self.rate).to(wave.device)
        return torch.log(filters @ spectrum + 1e-6)


class Spotter(nn.Module):
    def __init__(self, words, width=64):
        super().__init__()
        self.features = LogMel()
        self.norm = nn.BatchNorm1d(64)
        self.body = nn.Sequential(
            nn.Conv1d(64, width, 9, stride=2, padding=4), nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=4), nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=4), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        )  # fmt: skip
        self.out = nn.Linear(width, words)

    def forward(self, wave):
        return self.out(self.body(self.norm(self.features(wave))))


def utterances(count, words, samples):
    """Two tones per word, in noise."""
    word = torch.randint(words, (count,))
    t = torch.arange(samples) / 16000
    low, high = 300 + 70 * word, 1500 + 210 * ((5 * word) % words)
    wave = torch.sin(2 * math.pi * low[:, None] * t) + torch.sin(2 * math.pi * high[:, None] * t)
    return wave + torch.randn(count, samples), word


def run(words=20, batch=16, samples=12_000, iterations=160):
    torch.manual_seed(8)
    train_x, train_y = utterances(640, words, samples)
    net = Spotter(words)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, iterations)
    for i in range(iterations):
        pick = torch.randint(len(train_x), (batch,))
        logits = net(train_x[pick])
        loss = F.cross_entropy(logits, train_y[pick], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if i % 40 == 0:
            print(f"iteration {i}: loss {loss.item():.3f}")


run()
