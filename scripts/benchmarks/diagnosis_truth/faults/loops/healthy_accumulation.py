"""Four micro-batches per step; the loss is divided by four."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "Gradient accumulation over four micro-batches; nearly all of the time is forward and backward.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "skipped-steps", "gradients-not-cleared"],
    "healthy": True,
}

torch.manual_seed(0)
model = LM(d=128, L=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
for _ in range(30):
    for _ in range(4):
        ids = torch.randint(512, (4, 65))
        loss = loss_fn(model(ids[:, :-1]), ids[:, 1:]) / 4
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
