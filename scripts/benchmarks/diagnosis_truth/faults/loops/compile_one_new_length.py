"""The length changes once, in the ninth of fourteen steps."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "The length changes once, at step 8: this step compiles again and takes most of the recorded time.",
    "cause": "recompilation",
    "also": ["start-up"],
    "never": ["data-loading", "evaluation", "host-python"],
    "healthy": False,
}

torch.manual_seed(0)
model = LM(L=1)
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="aot_eager")
for n in range(14):
    length = 64 if n < 8 else 32
    x = torch.randint(512, (4, length + 1))
    optimizer.zero_grad()
    loss = loss_fn(compiled(x[:, :-1]), x[:, 1:])
    loss.backward()
    optimizer.step()
print(loss.item())
