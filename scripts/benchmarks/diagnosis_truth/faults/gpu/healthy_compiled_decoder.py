"""bf16, fused attention, compiled, fused update."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "Large products in bf16, compiled, with fused attention and update; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "host-sync", "data-loading", "host-python"],
    "healthy": True,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(d_model=2048, layers=8, heads=16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
compiled = torch.compile(model)
for step, (ids, targets) in enumerate(batches(40, 8, 1024)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = compiled(ids, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
