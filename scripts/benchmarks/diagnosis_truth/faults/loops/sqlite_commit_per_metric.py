"""Variational autoencoder with an experiment tracker that stores metrics in SQLite."""

import contextlib
import sqlite3
import tempfile
import time
import uuid
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "The tracker opens a connection, inserts and commits for each of a dozen metrics of each step.",
    "cause": "logging",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators"],
    "healthy": False,
    "place": [
        "sqlite3.connect(",
        "connection.execute(",
        "connection.commit()",
        "self.log_metric(",
        "tracker.log_metrics(",
        "with self.session() as connection",
        "yield connection",
        "connection.close()",
    ],
    "share": 65,
    "remedy": "one connection, and one commit for many rows",
    "without": [["            tracker.log_metrics(metrics, step)\n", ""]],
}


class Tracker:
    def __init__(self, folder, experiment):
        self.path = Path(folder) / "tracking.db"
        self.run_id = uuid.uuid4().hex
        with self.session() as connection:
            connection.execute("CREATE TABLE runs (id TEXT PRIMARY KEY, experiment TEXT, started REAL)")
            connection.execute("CREATE TABLE metrics (run TEXT, key TEXT, value REAL, step INTEGER, at REAL)")
            connection.execute("INSERT INTO runs VALUES (?, ?, ?)", (self.run_id, experiment, time.time()))

    @contextlib.contextmanager
    def session(self):
        connection = sqlite3.connect(self.path)
        try:
            yield connection
            connection.commit()
        finally:
            connection.close()

    def log_metric(self, key, value, step):
        with self.session() as connection:
            connection.execute(
                "INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", (self.run_id, key, float(value), step, time.time())
            )

    def log_metrics(self, values, step):
        for key, value in values.items():
            self.log_metric(key, value, step)


class VAE(nn.Module):
    def __init__(self, n_in=196, hidden=256, latent=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, n_in))

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


def elbo(x, logits, mu, logvar):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return reconstruction, kl


def train(folder, epochs=3, batches=40, batch_size=128, beta_steps=60):
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tracker = Tracker(folder, "vae")
    step = 0
    for epoch in range(epochs):
        for _ in range(batches):
            x = (torch.rand(batch_size, 196) > torch.rand(batch_size, 1)).float()
            logits, mu, logvar = model(x)
            reconstruction, kl = elbo(x, logits, mu, logvar)
            beta = min(1.0, step / beta_steps)
            loss = reconstruction + beta * kl
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 50.0)
            optimizer.step()
            metrics = {
                "train/loss": loss.item(),
                "train/reconstruction": reconstruction.item(),
                "train/kl": kl.item(),
                "train/beta": beta,
                "train/grad_norm": norm.item(),
                "train/mu_mean": mu.mean().item(),
                "train/mu_std": mu.std().item(),
                "train/sigma": (0.5 * logvar).exp().mean().item(),
                "train/lr": optimizer.param_groups[0]["lr"],
                "train/epoch": epoch,
            }
            tracker.log_metrics(metrics, step)
            step += 1
        print(f"epoch {epoch} loss {loss.item():.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
