"""Train a language model as the tutorial has it."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "All products run in fp32 without tensor cores; they are most of the step.",
    "cause": "fp32-products",
    "also": ["elementwise-chain"],
    "never": ["host-python", "data-loading", "launch-bound", "start-up"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(d_model=1024, layers=8, heads=16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step, (ids, targets) in enumerate(batches(40, 8, 512)):
    _, loss = model(ids, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
