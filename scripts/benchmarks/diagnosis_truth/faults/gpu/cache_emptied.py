"""Against an out-of-memory error of long ago."""

import gc

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "torch.cuda.empty_cache() after each step gives all memory back, and the next step asks for it again.",
    "cause": "device-allocation",
    "also": ["garbage-collection", "blocking-call", "host-sync"],
    "never": ["data-loading", "launch-bound", "fp32-products"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(d_model=768, layers=8, heads=12).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step, (ids, targets) in enumerate(batches(60, 8, 512)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    del loss
    torch.cuda.empty_cache()
    if step % 50 == 0:
        gc.collect()
