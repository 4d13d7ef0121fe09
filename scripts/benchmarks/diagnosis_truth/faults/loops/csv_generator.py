"""Batches come from a generator that parses a CSV file line by line."""

import csv
import random
import tempfile
from pathlib import Path

import torch
from torch import nn

CASE = {
    "truth": "The generator parses 600 lines of CSV in Python for each batch, most of the step.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators", "logging"],
    "healthy": False,
}

random.seed(0)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "train.csv"
with open(path, "w") as file:
    for _ in range(3000):
        file.write(",".join(f"{random.gauss(0, 1):.5f}" for _ in range(40)) + "\n")


def batches(path, size):
    while True:
        rows = []
        with open(path, newline="") as file:
            for row in csv.reader(file):
                rows.append([float(v) for v in row])
                if len(rows) == size:
                    yield torch.tensor(rows)
                    rows = []


def train(steps=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(39, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    source = batches(path, 600)
    for _ in range(steps):
        rows = next(source)
        loss = nn.functional.mse_loss(model(rows[:, :39]), rows[:, 39:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


print(train())
