"""Attention written out, to be understood."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "Attention writes its scores of 2048 x 2048 for each head to memory, masks and normalises them there.",
    "cause": "unfused-attention",
    "also": ["elementwise-chain", "score-matrices"],
    "never": ["host-python", "data-loading", "launch-bound", "host-sync"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(d_model=768, layers=8, heads=12, context=2048, fused=False).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _step, (ids, targets) in enumerate(batches(40, 8, 2048)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
