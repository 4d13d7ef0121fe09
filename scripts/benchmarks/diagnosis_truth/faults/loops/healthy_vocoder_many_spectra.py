"""Bandwidth extension of speech-like sounds; the loss compares spectra at four resolutions."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 8,
    "truth": "The loss takes spectra of output and target at four resolutions, which is most of what is not convolution; crops are drawn anew, so that spectra of targets cannot be kept.",
    "cause": None,
    "also": [],
    "never": [
        "small-operators",
        "elementwise-chain",
        "host-python",
        "duplicate-forward",
        "repeated-backward",
        "data-loading",
        "growth",
    ],
    "healthy": True,
}


class MultiResolutionSTFT(nn.Module):
    def __init__(self, sizes=(128, 256, 512, 1024)):
        super().__init__()
        self.sizes = sizes
        for n in sizes:
            self.register_buffer(f"window_{n}", torch.hann_window(n))

    def magnitude(self, wave, n):
        spectrum = torch.stft(wave, n, n // 4, window=getattr(self, f"window_{n}"), return_complex=True)
        return spectrum.abs().clamp_min(1e-5)

    def forward(self, output, target):
        loss = 0.0
        for n in self.sizes:
            got, wanted = self.magnitude(output, n), self.magnitude(target, n)
            loss = loss + (got - wanted).norm() / wanted.norm() + F.l1_loss(got.log(), wanted.log())
        return loss / len(self.sizes)


class Extender(nn.Module):
    def __init__(self, width=24, depth=5):
        super().__init__()
        self.first = nn.Conv1d(1, width, 7, padding=3)
        self.body = nn.ModuleList([nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i) for i in range(depth)])
        self.last = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, x):
        h = self.first(x)
        for layer in self.body:
            h = h + layer(F.leaky_relu(h, 0.1))
        return x + self.last(h)


def voices(count, samples, rate=8000):
    """Harmonics of a gliding pitch."""
    t = torch.arange(samples) / rate
    pitch = 90 + 160 * torch.rand(count, 1) + 20 * torch.sin(2 * math.pi * 3 * t + 6 * torch.rand(count, 1))
    phase = 2 * math.pi * torch.cumsum(pitch / rate, 1)
    return sum(torch.sin(k * phase) / k for k in range(1, 13)) * 0.3


def narrow(wave):
    """Low-pass to what a telephone passes."""
    spectrum = torch.fft.rfft(wave)
    spectrum[:, spectrum.shape[1] // 4 :] = 0
    return torch.fft.irfft(spectrum, wave.shape[1])


def main(steps=120, batch=2, crop=3072):
    torch.manual_seed(53)
    wide = voices(48, 16_000)
    thin = narrow(wide)
    model, criterion = Extender(), MultiResolutionSTFT()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        start = int(torch.randint(wide.shape[1] - crop, ()))
        pick = torch.randint(len(wide), (batch,))
        target, x = wide[pick, start : start + crop], thin[pick, start : start + crop]
        loss = criterion(model(x.unsqueeze(1)).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step}: spectral loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
