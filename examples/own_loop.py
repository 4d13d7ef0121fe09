"""A training loop of your own, recorded: its phases, a trace, and an ordinary record for the reports.

python examples/own_loop.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cs_systems


def train(out: str) -> cs_systems.Recorder:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(4000, 64), torch.randint(10, (4000,))), batch_size=32)
    with cs_systems.Recorder(model, optimizer, out=out, name="own") as recorder:
        for inputs, labels in loader:
            with recorder.step():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    return recorder


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clean, *_ = train(folder).records  # the timing; the profile is a record of its own
        frame = clean.frame().set_index("phase")
        print((frame["median_s"] * 1e3).rename("median in ms").round(3).to_string())


if __name__ == "__main__":
    main()
