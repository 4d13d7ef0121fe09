"""A variational autoencoder of small pictures, with callbacks that follow what it draws."""

import os

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

CASE = {
    "generation": 5,
    "truth": "A callback draws a grid of reconstructions after each batch and writes it as an optimised PNG: much of the time.",
    "cause": "logging",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "periodic-pause", "small-operators"],
    "healthy": False,
    "place": [
        "Image.fromarray(",
        "picture.save(",
        "picture.resize(",
        "callback.on_batch_end(",
        "grid = rows.permute(",
        "rows = pairs.view(",
    ],
    "share": 64,
    "remedy": "write the grid once in some hundred batches, without optimize=True",
    "without": [["    callbacks = [LossPrinter(25), SampleGrid()]\n", "    callbacks = [LossPrinter(25)]\n"]],
}


class Callback:
    def on_train_begin(self, trainer):
        pass

    def on_batch_end(self, trainer, number, outputs):
        pass


class LossPrinter(Callback):
    def __init__(self, every):
        self.every = every

    def on_batch_end(self, trainer, number, outputs):
        if number % self.every == 0:
            print(f"batch {number}: elbo {-outputs['loss'].item():.1f} kl {outputs['kl'].item():.2f}")


class SampleGrid(Callback):
    """Pictures and reconstructions next to each other, one file per batch."""

    def __init__(self, folder="samples", rows=8):
        self.folder, self.rows = folder, rows

    def on_train_begin(self, trainer):
        os.makedirs(self.folder, exist_ok=True)

    def on_batch_end(self, trainer, number, outputs):
        pairs = torch.stack([outputs["input"], outputs["mean"].detach()], 1).flatten(0, 1)[: 2 * self.rows**2]
        rows = pairs.view(self.rows, -1, *pairs.shape[-2:])
        grid = rows.permute(0, 2, 1, 3).reshape(rows.shape[0] * rows.shape[2], -1)
        picture = Image.fromarray((255 * grid.clamp(0, 1)).numpy().astype(np.uint8))
        picture = picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.BICUBIC)
        picture.save(os.path.join(self.folder, f"{number:05d}.png"), optimize=True)


class VAE(nn.Module):
    def __init__(self, width=24, latent=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.SiLU(), nn.Flatten()
        )
        self.stats = nn.Linear(2 * width * 64, 2 * latent)
        self.expand = nn.Linear(latent, 2 * width * 64)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (2 * width, 8, 8)),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
        )

    def forward(self, x):
        mean, log_var = self.stats(self.encoder(x)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(self.expand(z)).sigmoid(), mean, log_var


class Trainer:
    def __init__(self, model, callbacks, lr=1e-3):
        self.model, self.callbacks = model, callbacks
        self.optimizer = torch.optim.NAdam(model.parameters(), lr=lr)

    def fit(self, batches):
        for callback in self.callbacks:
            callback.on_train_begin(self)
        for number, x in enumerate(batches):
            outputs = self.train_batch(x)
            for callback in self.callbacks:
                callback.on_batch_end(self, number, outputs)

    def train_batch(self, x):
        out, mean, log_var = self.model(x)
        kl = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum(1).mean()
        loss = F.binary_cross_entropy(out, x, reduction="sum") / len(x) + kl
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "kl": kl.detach(), "input": x[:, 0], "mean": out[:, 0]}


def blobs(count, size=64, side=32):
    """Batches of two soft discs."""
    grid = torch.linspace(-1, 1, side)
    for _ in range(count):
        centre = torch.rand(size, 2, 2, 1, 1) * 1.6 - 0.8
        distance = (grid[None, None, :, None] - centre[:, :, 0]) ** 2 + (
            grid[None, None, None, :] - centre[:, :, 1]
        ) ** 2
        yield torch.exp(-12 * distance).amax(1, keepdim=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    callbacks = [LossPrinter(25), SampleGrid()]
    Trainer(VAE(), callbacks).fit(blobs(75))
