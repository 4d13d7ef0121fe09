"""The Recorder in the script; batches of eight, padded to 250, with seven short samples each."""

import random

import torch
import torch.nn.functional as F
from _transformer import LM

import cs_systems

CASE = {
    "truth": "80% of the positions of each batch are padding.",
    "cause": "padding",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
    "command": "python",
}

random.seed(0)
model = LM(d=64)
optimizer = torch.optim.AdamW(model.parameters())
with cs_systems.Recorder(model, optimizer, out="recorded", warmup=3, steps=20, profile="none") as recorder:
    for _ in range(26):
        lengths = [random.choice([16, 20, 24, 28, 30]) for _ in range(7)] + [250]
        x = torch.zeros(8, 250, dtype=torch.long)
        for i, length in enumerate(lengths):
            x[i, :length] = torch.randint(1, 512, (length,))
        with recorder.step(tokens=sum(lengths)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), ignore_index=0)
            loss.backward()
            optimizer.step()
