"""Tells bird calls apart from their spectra; gradients are averaged by hand."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 11,
    "truth": "Every rank makes the spectra of the whole global batch and then keeps only its own half, so half of the preparation is thrown away.",
    "cause": "data-loading",
    "also": ["host-python", "small-operators"],
    "never": ["straggler", "small-buckets", "exposed-communication", "growth", "checkpoint-writing", "evaluation"],
    "healthy": False,
    "ranks": 2,
    "place": [
        "loader = DataLoader(",
        "for spectra, kinds in loader",
        "spectra, kinds = spectra[rank::world]",
        "def __getitem__(",
    ],
    "share": 30,
    "remedy": "give each rank only its own indices (DistributedSampler and a batch of BATCH // world)",
    "without": [
        [
            "    loader = DataLoader(calls, batch_size=BATCH, shuffle=True, generator=order, drop_last=True)\n",
            "    sampler = torch.utils.data.DistributedSampler(calls, seed=9)\n"
            "    loader = DataLoader(calls, batch_size=BATCH // world, sampler=sampler, drop_last=True)\n",
        ],
        ["            spectra, kinds = spectra[rank::world], kinds[rank::world]\n", ""],
    ],
}

RATE, SECONDS, BATCH, KINDS = 8000, 3, 24, 12


class BirdCalls(Dataset):
    """Short recordings; an item is the normalised log-mel spectrum of one, shifted and with noise."""

    def __init__(self, count, bands=48, size=512):
        generator = torch.Generator().manual_seed(21)
        self.kinds = torch.randint(0, KINDS, (count,), generator=generator)
        self.window = torch.hann_window(size)
        self.size = size
        time = torch.arange(RATE * SECONDS) / RATE
        pitch = 400 + 200 * self.kinds[:, None] + 120 * torch.randn(count, 1, generator=generator)
        self.waves = torch.sin(2 * math.pi * pitch * time + 6 * torch.sin(2 * math.pi * 5 * time))
        edges = torch.linspace(0, size // 2, bands + 2)
        bins = torch.arange(size // 2 + 1)[None]
        left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        self.mel = torch.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)).clamp(min=0)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        wave = self.waves[index].roll(int(torch.randint(0, RATE, ())))
        wave = wave + 1.5 * torch.randn_like(wave)
        power = torch.stft(wave, self.size, 128, window=self.window, return_complex=True).abs() ** 2
        spectrum = torch.log(self.mel @ power + 1e-6)
        return (spectrum - spectrum.mean()) / spectrum.std(), self.kinds[index]


def make_model():
    return nn.Sequential(
        nn.Conv1d(48, 64, 5, stride=2), nn.ReLU(),
        nn.Conv1d(64, 96, 5, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(384, KINDS),
    )  # fmt: skip


def average_gradients(parameters, world):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= world
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(part.view_as(p))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = make_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    calls = BirdCalls(480)
    order = torch.Generator().manual_seed(9)
    loader = DataLoader(calls, batch_size=BATCH, shuffle=True, generator=order, drop_last=True)
    torch.manual_seed(70 + rank)
    for epoch in range(4):
        for spectra, kinds in loader:
            spectra, kinds = spectra[rank::world], kinds[rank::world]
            loss = nn.functional.cross_entropy(model(spectra), kinds)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(parameters, world)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
