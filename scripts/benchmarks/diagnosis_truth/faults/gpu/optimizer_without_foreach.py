"""foreach=False, since it takes less memory."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "AdamW updates each of 500 parameters by a dozen kernels of its own; the update is most of the step.",
    "cause": "unfused-optimizer",
    "also": ["launch-bound"],
    "never": ["data-loading", "host-sync", "fp32-products"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(d_model=256, layers=40, heads=4, vocab=8192).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
compiled = torch.compile(model, mode="reduce-overhead")
for _step, (ids, targets) in enumerate(batches(50, 8, 256, vocab=8192)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = compiled(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
