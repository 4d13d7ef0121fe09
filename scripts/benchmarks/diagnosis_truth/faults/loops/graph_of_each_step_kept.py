"""The losses of all steps are kept with their graphs (retain_graph=True)."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "The graph of each step stays alive in a list of losses: memory grows by about 20 MB per step.",
    "cause": "growth",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "recompilation"],
    "healthy": False,
}

torch.manual_seed(0)
model = LM(d=128)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
losses = []
for _ in range(50):
    x = torch.randint(512, (8, 129))
    optimizer.zero_grad()
    loss = loss_fn(model(x[:, :-1]), x[:, 1:])
    loss.backward(retain_graph=True)
    optimizer.step()
    losses.append(loss)
print(sum(losses).item() / len(losses))
