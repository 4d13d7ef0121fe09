"""Exponential moving average of the weights, by names of the state."""

import copy

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "The average is computed tensor by tensor on the host's way, with copies: 3 small kernels for each of 400 tensors.",
    "cause": "host-python",
    "also": [
        "launch-bound",
        "small-operators",
        "needless-copies",
        "unfused-optimizer",
        "elementwise-chain",
        "model-copies",
    ],
    "never": ["data-loading", "evaluation", "fp32-products", "host-sync"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["average[name]", "update(", "for name, value"],
}


def update(average, model, decay=0.999):
    state = copy.deepcopy(average)
    for name, value in model.state_dict().items():
        average[name] = state[name] * decay + value.detach().clone() * (1 - decay)


torch.manual_seed(0)
model = GPT(d_model=256, layers=32, heads=4, vocab=8192).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
compiled = torch.compile(model, mode="reduce-overhead")
average = copy.deepcopy(model.state_dict())
for _step, (ids, targets) in enumerate(batches(50, 8, 256, vocab=8192)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = compiled(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update(average, model)
