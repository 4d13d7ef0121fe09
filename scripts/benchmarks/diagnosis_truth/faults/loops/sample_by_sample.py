"""The batch is trained one sample at a time in a Python loop, with sixteen-wide layers."""

import torch
from torch import nn

CASE = {
    "truth": "Each of 48 samples goes through the network by itself; the time is the overhead of small operators.",
    "cause": "small-operators",
    "also": ["host-python", "launch-bound"],
    "never": ["start-up", "data-loading", "evaluation", "padding"],
    "healthy": False,
}


class TreeScorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.merge, self.score = nn.Embedding(50, 16), nn.Linear(32, 16), nn.Linear(16, 2)

    def forward(self, tree):
        if isinstance(tree, int):
            return self.word(torch.tensor(tree))
        left, right = (self.forward(t) for t in tree)
        return torch.relu(self.merge(torch.cat([left, right])))


def tree(g, depth=3):
    if depth == 0:
        return int(torch.randint(0, 50, (1,), generator=g))
    return (tree(g, depth - 1), tree(g, depth - 1))


g = torch.Generator().manual_seed(0)
torch.manual_seed(0)
trees = [(tree(g), i % 2) for i in range(48)]
model = TreeScorer()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(30):
    opt.zero_grad()
    losses = [nn.functional.cross_entropy(model.score(model(t))[None], torch.tensor([y])) for t, y in trees]
    torch.stack(losses).mean().backward()
    opt.step()
