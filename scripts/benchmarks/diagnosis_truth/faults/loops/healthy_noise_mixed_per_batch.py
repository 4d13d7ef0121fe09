"""Speech without its noise: each batch mixes voices with other noise, and a network masks the spectrum."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "Each batch is mixed and transformed anew because its noise differs, the mask is complex, and the loss compares sounds after the inverse transform; convolutions and the recurrent layer take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "data-loading",
        "host-python",
        "duplicate-forward",
        "casts",
        "layout-conversion",
        "small-operators",
        "growth",
        "same-randomness",
        "broadcast-loss",
    ],
    "healthy": True,
}

RATE = 8000


def voices(count, seconds=1):
    """Return tones with overtones whose loudness follows syllables."""
    time = torch.linspace(0, seconds, RATE * seconds)
    pitch = 100 + 150 * torch.rand(count, 1)
    syllables = torch.relu(torch.sin(6.28 * (2 + 3 * torch.rand(count, 1)) * time))
    tones = sum(torch.sin(6.28 * k * pitch * time + 6.28 * torch.rand(count, 1)) / k for k in range(1, 7))
    return syllables * tones


def noises(count, seconds=1):
    white = torch.randn(count, RATE * seconds)
    return torch.cumsum(white, 1) * 0.05 + 0.5 * white


class Mixer:
    """Endless batches of a noisy sound and its clean part, at random loudness."""

    def __init__(self, voices, noises, size):
        self.voices = F.layer_norm(voices, voices.shape[1:])
        self.noises = F.layer_norm(noises, noises.shape[1:])
        self.size = size

    def __iter__(self):
        return self

    def __next__(self):
        clean = self.voices[torch.randint(len(self.voices), (self.size,))]
        noise = self.noises[torch.randint(len(self.noises), (self.size,))]
        level = 10 ** (torch.empty(self.size, 1).uniform_(-10, 5) / 20)
        return clean + level * noise, clean


class MaskNet(nn.Module):
    def __init__(self, width=64, bins=129):
        super().__init__()
        self.register_buffer("window", torch.hann_window(256))
        self.convolutions = nn.Sequential(
            nn.Conv1d(2 * bins, 2 * width, 5, padding=2), nn.ReLU(),
            nn.Conv1d(2 * width, 2 * width, 5, padding=2), nn.ReLU(),
        )  # fmt: skip
        self.memory = nn.GRU(2 * width, 2 * width, batch_first=True)
        self.out = nn.Linear(2 * width, 2 * bins)

    def forward(self, sound):
        spectrum = torch.stft(sound, 256, hop_length=128, window=self.window, return_complex=True)
        parts = torch.view_as_real(spectrum).permute(0, 3, 1, 2).flatten(1, 2)
        hidden, _ = self.memory(self.convolutions(parts / 10).transpose(1, 2))
        mask = torch.tanh(self.out(hidden)).transpose(1, 2).unflatten(1, (2, -1))
        masked = spectrum * torch.complex(mask[:, 0], mask[:, 1])
        return torch.istft(masked, 256, hop_length=128, window=self.window, length=sound.shape[1])


def distortion(found, clean):
    """Return the negative ratio of the clean part to the rest in decibels, whatever the loudness."""
    share = (found * clean).sum(1, keepdim=True) / (clean**2).sum(1, keepdim=True)
    rest = found - share * clean
    return -10 * torch.log10(((share * clean) ** 2).sum(1) / ((rest**2).sum(1) + 1e-8) + 1e-8).mean()


torch.manual_seed(173)
mixer = Mixer(voices(150), noises(60), size=10)
net = MaskNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
average = None
for step, (noisy, clean) in enumerate(mixer, 1):
    found = net(noisy)
    loss = distortion(found, clean) + 0.1 * F.l1_loss(found, clean)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
    average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
    if step % 25 == 0:
        print(f"step {step}: loss {average:.2f}")
    if step == 75:
        break
