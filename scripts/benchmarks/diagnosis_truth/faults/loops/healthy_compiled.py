"""A compiled model, trained on one shape and evaluated on one batch after every tenth step."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "The compiled model (aot_eager) compiles once for training and once for evaluation, without graph breaks.",
    "cause": None,
    "also": ["start-up", "unfused-optimizer"],
    "never": ["recompilation", "data-loading", "host-python"],
    "healthy": True,
}

torch.manual_seed(0)
model = LM()
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="aot_eager")
for n in range(60):
    if n % 10 == 0:
        compiled.eval()
        with torch.no_grad():
            value = loss_fn(compiled(torch.randint(512, (4, 64))), torch.randint(512, (4, 64)))
        compiled.train()
    x = torch.randint(512, (4, 65))
    optimizer.zero_grad()
    loss = loss_fn(compiled(x[:, :-1]), x[:, 1:])
    loss.backward()
    optimizer.step()
print(loss.item(), value.item())
