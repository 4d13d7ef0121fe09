"""A small model for a small budget."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "Every kernel takes some microseconds, less than its launch; the GPU waits for the host.",
    "cause": "launch-bound",
    "also": ["host-python"],
    "never": ["data-loading", "host-sync", "fp32-products", "elementwise-chain"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(vocab=1024, d_model=128, layers=12, heads=4, context=128).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _step, (ids, targets) in enumerate(batches(80, 4, 128, vocab=1024)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
