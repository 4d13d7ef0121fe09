"""Long sequences with fused attention."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "At a context of 16,384 fused attention is half of the step; it runs near what the chip can do.",
    "cause": None,
    "also": [],
    "never": ["unfused-attention", "launch-bound", "host-sync", "data-loading", "host-python"],
    "healthy": True,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(vocab=8192, d_model=1024, layers=6, heads=8, context=16384).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
compiled = torch.compile(model)
for _step, (ids, targets) in enumerate(batches(40, 2, 16384, vocab=8192)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = compiled(ids, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
