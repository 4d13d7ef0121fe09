"""Log the norm of each parameter's gradient."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "A line computes and reads 255 norms a step, more than half of the time; without the waits alone 3% are saved.",
    "cause": "host-python",
    "also": ["logging", "host-sync", "launch-bound"],
    "never": ["data-loading", "evaluation", "fp32-products"],
    "healthy": False,
    "requires": ["cuda"],
    "place": [".norm().item()"],
}

torch.manual_seed(0)
model = GPT(d_model=768, layers=8, heads=12).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
history = []
for _step, (ids, targets) in enumerate(batches(50, 4, 256)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    norms = {}
    for _ in range(3):  # mean over three kinds of norm, as the dashboard shows them
        for name, parameter in model.named_parameters():
            norms[name] = parameter.grad.norm().item()
    history.append(max(norms.values()))
    optimizer.step()
