"""Stops of a bus network as vectors: stops that follow each other in journeys attract, drawn ones repel."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Both tables have sparse gradients and an optimizer for them; the other stops are drawn for the whole batch at once, and reading rows and their products take the time.",
    "cause": None,
    "also": [],
    "never": [
        "dense-gradient",
        "index-backward",
        "small-operators",
        "broadcast-loss",
        "data-loading",
        "host-python",
        "cut-gradients",
        "unused-gradients",
        "growth",
        "casts",
    ],
    "healthy": True,
}

STOPS, WIDTH, DRAWN = 80000, 64, 12


def journeys(count):
    """Return pairs of stops that lie close to each other on a line."""
    first = (torch.rand(count) ** 2 * (STOPS - 50)).long()
    return first, first + torch.randint(1, 50, (count,))


class Map(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.Embedding(STOPS, WIDTH, sparse=True)
        self.around = nn.Embedding(STOPS, WIDTH, sparse=True)
        nn.init.uniform_(self.centre.weight, -0.5, 0.5)
        nn.init.zeros_(self.around.weight)

    def forward(self, first, second, drawn):
        one = self.centre(first)
        others = self.around(torch.cat([second[:, None], drawn], 1))
        return torch.bmm(others, one[:, :, None]).squeeze(2)


def main(steps=150, batch=1024):
    torch.manual_seed(77)
    first, second = journeys(300000)
    model = Map()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    near = torch.zeros(batch, 1 + DRAWN)
    near[:, 0] = 1
    for step in range(1, steps + 1):
        pick = torch.randint(len(first), (batch,))
        drawn = torch.randint(STOPS, (batch, DRAWN))
        scores = model(first[pick], second[pick], drawn)
        loss = F.binary_cross_entropy_with_logits(scores, near, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item() / near.numel():.4f}")


if __name__ == "__main__":
    main()
