"""The optimizer's state stays in the host's memory, to save the card's."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "Gradients go to the host, AdamW runs there on 85 million weights, and the weights come back.",
    "cause": "cpu-offload",
    "also": ["host-python", "exposed-copies", "pageable-copies"],
    "never": ["data-loading", "launch-bound", "fp32-products"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(d_model=768, layers=8, heads=12).cuda()
masters = [p.detach().cpu().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=3e-4)
for _step, (ids, targets) in enumerate(batches(36, 8, 512)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    loss.backward()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.cpu()
            parameter.grad = None
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
