"""A small vision transformer, and a CSV logger that keeps its rows in a DataFrame."""

import tempfile
from pathlib import Path

import pandas as pd
import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "Each step concatenates a DataFrame of 60 metrics with one more row and writes the whole CSV file again.",
    "cause": "logging",
    "also": ["host-python", "growth"],
    "never": ["start-up", "data-loading", "evaluation", "small-operators", "periodic-pause", "checkpoint-writing"],
    "healthy": False,
    "requires": ["pandas"],
    "place": ["pd.concat(", ".to_csv(", "self.logger.log(", "pd.DataFrame("],
    "share": 31,
    "remedy": "append one line to the file, or write it every hundredth step",
    "without": [["            self.logger.log(row)\n", ""]],
}


class CSVLogger:
    def __init__(self, path):
        self.path, self.table = path, pd.DataFrame()

    def log(self, row):
        self.table = pd.concat([self.table, pd.DataFrame([row])], ignore_index=True)
        self.table.to_csv(self.path, index=False)


class PatchClassifier(nn.Module):
    def __init__(self, d=64, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, d, 8, stride=8)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, classes)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens).mean(1))


class Fitter:
    def __init__(self, model, logger, device="cpu"):
        self.model, self.logger = model.to(device), logger
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-3, total_steps=150)
        self.step = 0

    def train_one_epoch(self, data):
        self.model.train()
        for images, target in data:
            logits = self.model(images)
            loss = nn.functional.cross_entropy(logits, target)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            row = {"step": self.step, "loss": loss.item(), "lr": self.scheduler.get_last_lr()[0]}
            means = logits.detach().mean(0).tolist()
            row |= {f"mean/{c}": m for c, m in enumerate(means)}
            row |= {f"share/{c}": float((target == c).float().mean()) for c in range(10)}
            row |= {f"history/{c}": means[c % 10] * row["lr"] for c in range(40)}
            self.logger.log(row)
            self.step += 1


def images(count, batch=8):
    for _ in range(count):
        target = torch.randint(0, 10, (batch,))
        yield torch.randn(batch, 3, 32, 32) + target.view(-1, 1, 1, 1) / 5, target


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        fitter = Fitter(PatchClassifier(), CSVLogger(Path(folder) / "metrics.csv"))
        for epoch in range(3):
            fitter.train_one_epoch(images(50))
            print("epoch", epoch, "done")
