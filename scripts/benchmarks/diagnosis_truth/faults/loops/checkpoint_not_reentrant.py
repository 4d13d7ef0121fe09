"""Activation checkpointing of a language model's blocks, in the other form, with a scheduler and clipping."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "The blocks' forward runs again inside backward (activation checkpointing): a fifth of the step.",
    "cause": "recomputation",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "duplicate-forward"],
    "healthy": False,
}

torch.manual_seed(0)
model = LM(d=160, L=3, ckpt=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=50)
for _ in range(36):
    x = torch.randint(512, (6, 97))
    loss = loss_fn(model(x[:, :-1]), x[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
