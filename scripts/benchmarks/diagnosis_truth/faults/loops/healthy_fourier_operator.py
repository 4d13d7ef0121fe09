"""A Fourier neural operator that learns one step of a heat equation with a varying conductivity."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CASE = {
    "generation": 5,
    "truth": "Transforms, complex products over the kept modes and pointwise layers on large grids take the time; two short tests are little.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "evaluation", "host-python", "small-operators", "growth", "checkpoint-writing"],
    "healthy": True,
}


class SpectralConv2d(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        scale = 1 / channels**2
        self.low = nn.Parameter(scale * torch.randn(channels, channels, modes, modes, dtype=torch.cfloat))
        self.high = nn.Parameter(scale * torch.randn(channels, channels, modes, modes, dtype=torch.cfloat))

    @staticmethod
    def product(x, weight):
        return torch.einsum("bixy,ioxy->boxy", x, weight)

    def forward(self, x):
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :m, :m] = self.product(spectrum[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = self.product(spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO(nn.Module):
    def __init__(self, channels=24, modes=8, depth=3):
        super().__init__()
        self.lift = nn.Conv2d(4, channels, 1)
        self.spectral = nn.ModuleList(SpectralConv2d(channels, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(depth))
        self.project = nn.Sequential(nn.Conv2d(channels, 64, 1), nn.GELU(), nn.Conv2d(64, 1, 1))

    def forward(self, fields):
        x = self.lift(fields)
        for spectral, local in zip(self.spectral, self.local):
            x = nn.functional.gelu(spectral(x) + local(x))
        return self.project(x)


class RelativeL2(nn.Module):
    def forward(self, prediction, truth):
        return ((prediction - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).mean()


def smooth(count, side, scale):
    """Random fields with a falling spectrum."""
    frequency = torch.fft.fftfreq(side) * side
    power = (1 + frequency[:, None] ** 2 + frequency[None, : side // 2 + 1] ** 2) ** (-scale / 2)
    return torch.fft.irfft2(torch.fft.rfft2(torch.randn(count, 1, side, side)) * power, s=(side, side)) * 10


def solve(temperature, conductivity, steps=20, dt=0.15):
    for _ in range(steps):
        around = sum(torch.roll(temperature, shift, dim) for shift in (1, -1) for dim in (2, 3))
        temperature = temperature + dt * conductivity * (around - 4 * temperature)
    return temperature


def dataset(count=480, side=64):
    temperature, conductivity = smooth(count, side, 2.5), smooth(count, side, 2.0).sigmoid()
    line = torch.linspace(0, 2 * math.pi, side)
    place = torch.stack(torch.meshgrid(line.sin(), line.sin(), indexing="ij")).expand(count, -1, -1, -1)
    return TensorDataset(torch.cat([temperature, conductivity, place], 1), solve(temperature, conductivity))


def run_epoch(model, loader, criterion, optimizer=None, scheduler=None):
    training = optimizer is not None
    model.train(training)
    total = 0.0
    with torch.set_grad_enabled(training):
        for fields, truth in loader:
            loss = criterion(model(fields), truth)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
            total += loss.detach() * len(fields)
    return float(total) / len(loader.dataset)


def main(epochs=2, batch_size=8):
    torch.manual_seed(0)
    training, test = random_split(dataset(), (456, 24))
    loaders = DataLoader(training, batch_size, shuffle=True), DataLoader(test, batch_size)
    model, criterion = FNO(), RelativeL2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loaders[0]))
    for epoch in range(epochs):
        train_loss = run_epoch(model, loaders[0], criterion, optimizer, scheduler)
        test_loss = run_epoch(model, loaders[1], criterion)
        print(f"epoch {epoch}: train {train_loss:.4f}, test {test_loss:.4f}")


if __name__ == "__main__":
    main()
