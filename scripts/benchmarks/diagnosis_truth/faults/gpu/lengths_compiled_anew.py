"""Compile for exact shapes; the batches have many lengths."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "Batches of other lengths are compiled anew, each for seconds, until the limit is reached.",
    "cause": "recompilation",
    "also": ["start-up", "growth"],
    "never": ["data-loading", "host-sync", "fp32-products"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(d_model=512, layers=2, heads=8).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
compiled = torch.compile(model, dynamic=False)
for step, (ids, targets) in enumerate(batches(40, 8, 512)):
    length = 512 - step % 5 * 32 - step // 10 * 16
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = compiled(ids[:, :length].contiguous(), targets[:, :length].contiguous())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
