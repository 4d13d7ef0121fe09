"""Accuracy and perplexity by NumPy."""

import numpy as np
import torch
from _gpt import GPT, batches

CASE = {
    "truth": "The logits, 268 MB in fp32, are copied to the host in every step, and NumPy searches their maximum there.",
    "cause": "exposed-copies",
    "also": ["pageable-copies", "host-sync", "host-python", "logging"],
    "never": ["data-loading", "launch-bound", "fp32-products", "evaluation"],
    "healthy": False,
    "requires": ["cuda"],
    "place": [".cpu().numpy()"],
}


def accuracy(logits, targets):
    predicted = np.argmax(logits, axis=-1)
    return float((predicted == targets).mean())


torch.manual_seed(0)
model = GPT(d_model=512, layers=4, heads=8).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
total = 0.0
for step, (ids, targets) in enumerate(batches(40, 4, 512)):
    with torch.autocast("cuda", torch.bfloat16):
        logits, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += accuracy(logits.detach().float().cpu().numpy(), targets.cpu().numpy())
print(total / (step + 1))
