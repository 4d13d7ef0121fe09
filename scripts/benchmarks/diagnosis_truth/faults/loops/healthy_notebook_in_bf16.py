"""Digits drawn by a turtle, exported from a notebook: mixed precision on the CPU, a bar of progress, a curve."""

# %%
import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "generation": 13,
    "truth": "Under autocast the products run in bf16, for which this CPU has instructions; loss.item() and the accuracy after each step cost microseconds on a CPU. Products of wide layers take the time.",
    "cause": None,
    "also": [],
    "never": ["host-sync", "logging", "casts", "slow-precision", "data-loading", "host-python", "growth"],
    "healthy": True,
}

try:
    from tqdm.auto import tqdm
except ImportError:

    def tqdm(things, **options):
        return things


torch.manual_seed(0)

# %%
moves = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])


def drawn(count, steps=24, size=28):
    digit = torch.randint(10, (count,))
    recipe = torch.randint(4, (10, steps), generator=torch.Generator().manual_seed(1))
    turns = torch.where(torch.rand(count, steps) < 0.15, torch.randint(4, (count, steps)), recipe[digit])
    at = (14 + moves[turns].cumsum(1)).clamp(0, size - 1)
    image = torch.zeros(count, size, size)
    image[torch.arange(count).unsqueeze(1), at[..., 0], at[..., 1]] = 1.0
    return image.flatten(1) + 0.2 * torch.randn(count, size * size), digit


X, Y = drawn(12800)

# %%
model = nn.Sequential(
    nn.Linear(784, 2048),
    nn.ReLU(),
    nn.Linear(2048, 2048),
    nn.ReLU(),
    nn.Linear(2048, 2048),
    nn.ReLU(),
    nn.Linear(2048, 10),
)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses, accuracies = [], []
began = time.time()

# %%
for epoch in range(2):
    bar = tqdm(torch.randperm(len(X)).split(256), disable=None)
    for idx in bar:
        xb, yb = X[idx], Y[idx]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(xb)
            loss = F.cross_entropy(logits, yb)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        accuracies.append((logits.argmax(-1) == yb).float().mean().item())
        if hasattr(bar, "set_postfix"):
            bar.set_postfix(loss=losses[-1], acc=accuracies[-1])
    print(f"epoch {epoch + 1}: loss {sum(losses[-50:]) / 50:.3f}, accuracy {sum(accuracies[-50:]) / 50:.3f}")

# %%
print(f"{len(losses)} steps in {time.time() - began:.1f} s")
print("curve:", " ".join(f"{v:.2f}" for v in losses[::10]))
