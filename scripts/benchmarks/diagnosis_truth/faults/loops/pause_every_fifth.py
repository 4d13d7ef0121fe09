"""A pause of 200 ms after every fifth step, as a write to a slow disk would be."""

import time

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "A pause of 200 ms lies in every fifth step, outside the phases, and takes two thirds of the time.",
    "cause": "periodic-pause",
    "also": ["checkpoint-writing", "logging", "host-python"],
    "never": ["start-up", "data-loading", "garbage-collection"],
    "healthy": False,
}

model = LM()
optimizer = torch.optim.AdamW(model.parameters())
for n in range(40):
    x = torch.randint(512, (8, 65))
    optimizer.zero_grad()
    loss = loss_fn(model(x[:, :-1]), x[:, 1:])
    loss.backward()
    optimizer.step()
    if n % 5 == 4:
        time.sleep(0.2)
