"""Future meetings: links of a social graph from sampled neighbours of neighbours."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "Each batch draws neighbours of neighbours and unconnected pairs anew, with a few operators, and people occur many times in it; what they know about each neighbourhood differs by the draw, so nothing is computed twice, and products take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "data-loading",
        "host-python",
        "index-backward",
        "duplicate-forward",
        "dense-gradient",
        "small-operators",
        "growth",
        "same-randomness",
    ],
    "healthy": True,
}


class Society:
    """People in circles; most of their neighbours are of their own circle, and what is known of them hints at it."""

    def __init__(self, people=6000, circles=30, degree=20, known=96):
        self.people = people
        circle = torch.arange(people) % circles
        own = circle[:, None] + circles * torch.randint(people // circles, (people, degree))
        self.neighbours = torch.where(torch.rand(people, degree) < 0.8, own, torch.randint(people, (people, degree)))
        self.known = torch.randn(circles, known)[circle] * 0.4 + torch.randn(people, known)

    def sample(self, who, count):
        pick = torch.randint(self.neighbours.shape[1], (*who.shape, count))
        return self.neighbours[who[..., None], pick]

    def pairs(self, size):
        left = torch.randint(self.people, (size,))
        right = self.sample(left, 1)[:, 0]
        wrong = torch.randint(self.people, (size,))
        return torch.cat([left, right, wrong])


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, own, others):
        return F.relu(self.own(own) + self.others(others.mean(-2)))


class Sage(nn.Module):
    def __init__(self, known, width=320, counts=(6, 5)):
        super().__init__()
        self.counts = counts
        self.first, self.second = Layer(known, width), Layer(width, width)
        self.out = nn.Linear(width, 128)

    def forward(self, society, who):
        near = society.sample(who, self.counts[0])
        far = society.sample(near, self.counts[1])
        about_near = F.embedding(near, society.known)
        own = self.first(F.embedding(who, society.known), about_near)
        others = self.first(about_near, F.embedding(far, society.known))
        return self.out(self.second(own, others))


def main(steps=100, size=128):
    torch.manual_seed(175)
    society = Society()
    model = Sage(society.known.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=10)
    for step in range(1, steps + 1):
        left, right, wrong = model(society, society.pairs(size)).chunk(3)
        good, bad = (left * right).sum(1), (left * wrong).sum(1)
        loss = F.softplus(-good).mean() + F.softplus(bad).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.4f}, in order {(good > bad).float().mean().item():.1%}")


if __name__ == "__main__":
    main()
