"""A language model with an absurd learning rate."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "The loss is NaN from the second step on, as the learning rate is 1e30.",
    "cause": "nan-loss",
    "also": ["divergence"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}

torch.manual_seed(0)
model = LM()
optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
for _ in range(40):
    x = torch.randint(512, (8, 65))
    optimizer.zero_grad()
    loss = loss_fn(model(x[:, :-1]), x[:, 1:])
    loss.backward()
    optimizer.step()
print("loss", loss.item())
