"""A language model, evaluated on 30 batches in every tenth step."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "Every tenth step evaluates 30 batches with model.eval(), the time of about ten steps.",
    "cause": "evaluation",
    "also": ["periodic-pause"],
    "never": ["start-up", "data-loading"],
    "healthy": False,
}

torch.manual_seed(0)
model = LM()
optimizer = torch.optim.AdamW(model.parameters())
for n in range(40):
    if n % 10 == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(30):
                model(torch.randint(512, (8, 64)))
        model.train()
    x = torch.randint(512, (8, 65))
    optimizer.zero_grad()
    loss = loss_fn(model(x[:, :-1]), x[:, 1:])
    loss.backward()
    optimizer.step()
