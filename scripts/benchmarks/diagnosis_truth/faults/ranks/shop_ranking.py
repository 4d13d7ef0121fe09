"""Predicts clicks in a shop from the ids of the buyer and the article, and follows the area under the curve."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 11,
    "truth": "In each step the metric joins the scores of all steps so far, gathers them from all ranks and sorts them, so every step takes longer than the one before it.",
    "cause": "growth",
    "also": ["logging", "evaluation", "exposed-communication"],
    "never": [
        "straggler",
        "data-loading",
        "small-buckets",
        "checkpoint-writing",
        "find-unused-parameters",
        "start-up",
        "garbage-collection",
    ],
    "healthy": False,
    "ranks": 2,
    "place": ["area = curve.compute()", "torch.cat(self.scores)", "dist.all_gather(", "order = scores.argsort("],
    "share": 45,
    "remedy": "compute the metric every n-th step or at the end, and over a fixed window or counts in fixed bins",
    "without": [
        [
            "        area = curve.compute()\n",
            "        area = curve.compute() if step == STEPS - 1 else 0.0\n",
        ]
    ],
}

BUYERS, ARTICLES, STEPS = 3000, 2000, 90


class AreaUnderCurve:
    def __init__(self):
        self.scores, self.clicks = [], []

    def update(self, scores, clicks):
        self.scores.append(scores.detach())
        self.clicks.append(clicks)

    def compute(self):
        mine = torch.stack([torch.cat(self.scores), torch.cat(self.clicks)])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        scores, clicks = torch.cat(parts, 1)
        order = scores.argsort()
        ranks = torch.empty_like(scores)
        ranks[order] = torch.arange(1, len(scores) + 1, dtype=scores.dtype)
        clicked = clicks.sum()
        area = (ranks[clicks > 0].sum() - clicked * (clicked + 1) / 2) / (clicked * (len(clicks) - clicked))
        return area.item()


class Ranker(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.buyers = nn.Embedding(BUYERS, width)
        self.articles = nn.Embedding(ARTICLES, width)
        self.mix = nn.Sequential(
            nn.Linear(2 * width + 8, 384), nn.ReLU(), nn.Linear(384, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, buyer, article, context):
        return self.mix(torch.cat([self.buyers(buyer), self.articles(article), context], 1)).squeeze(1)


class Clicks:
    """Visits of a shop, with clicks that follow hidden tastes."""

    def __init__(self, rank):
        fixed = torch.Generator().manual_seed(31)
        self.tastes = torch.randn(BUYERS, 6, generator=fixed)
        self.traits = torch.randn(ARTICLES, 6, generator=fixed)
        self.generator = torch.Generator().manual_seed(310 + rank)

    def batch(self, size):
        buyer = torch.randint(0, BUYERS, (size,), generator=self.generator)
        article = torch.randint(0, ARTICLES, (size,), generator=self.generator)
        context = torch.randn(size, 8, generator=self.generator)
        chance = torch.sigmoid((self.tastes[buyer] * self.traits[article]).sum(1) + context[:, 0] - 1)
        return buyer, article, context, torch.bernoulli(chance, generator=self.generator)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(30)
    model = DDP(Ranker())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    visits = Clicks(rank)
    curve = AreaUnderCurve()
    for step in range(STEPS):
        buyer, article, context, click = visits.batch(512)
        logits = model(buyer, article, context)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, click)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.update(logits, click)
        area = curve.compute()
        if rank == 0 and step % 15 == 0:
            print(f"{step}: loss {loss.item():.3f}, area {area:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
