"""Learned compression: an autoencoder whose codes are rounded to whole numbers, as they are written to a file."""

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Codes are rounded between encoder and decoder, and the gradient of rounding is zero everywhere: the encoder gets gradients of zeros in every step and never changes, only the decoder learns.",
    "cause": "cut-gradients",
    "also": ["no-update"],
    "never": ["data-loading", "host-python", "growth", "start-up", "logging", "evaluation", "learning-rate-too-small"],
    "healthy": False,
    "place": ["codes = torch.round(self.encoder(x) * self.scale)", "return self.decoder(codes / self.scale)"],
    "remedy": "a straight-through estimate: y + (torch.round(y) - y).detach()",
    "without": [
        [
            "        codes = torch.round(self.encoder(x) * self.scale)\n",
            "        y = self.encoder(x) * self.scale\n        codes = y + (torch.round(y) - y).detach()\n",
        ]
    ],
}


class Codec(nn.Module):
    def __init__(self, inputs, width, codes):
        super().__init__()
        self.scale = 8.0
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, codes))
        self.decoder = nn.Sequential(nn.Linear(codes, width), nn.GELU(), nn.Linear(width, inputs))

    def forward(self, x):
        codes = torch.round(self.encoder(x) * self.scale)
        return self.decoder(codes / self.scale)


def patches(count, inputs, rank=12):
    return torch.randn(count, rank) @ torch.randn(rank, inputs) / rank**0.5


def run(steps=120, batch=1024):
    torch.manual_seed(14)
    data = patches(8192, 192)
    codec = Codec(192, 512, 24)
    optimizer = torch.optim.Adam(codec.parameters(), lr=1e-3, fused=True)
    for step in range(1, steps + 1):
        x = data[torch.randint(len(data), (batch,))]
        loss = (codec(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            yield step, loss.item()


for step, distortion in run():
    print(f"{step:5d}  distortion {distortion:.4f}")
