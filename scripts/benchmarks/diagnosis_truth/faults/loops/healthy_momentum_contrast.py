"""Momentum contrast with a queue of keys, accumulation of two micro-batches and a warm-up schedule."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 3,
    "truth": "Two encoders, a queue of fixed size, clipping and a schedule are the method; products of the encoders take the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "growth",
        "evaluation",
        "host-python",
        "model-copies",
        "skipped-steps",
        "periodic-pause",
    ],
    "healthy": True,
}


class MomentumContrast(nn.Module):
    def __init__(self, dim=64, size=2048, momentum=0.99, temperature=0.1):
        super().__init__()
        self.query, self.key = self.encoder(dim), self.encoder(dim)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.momentum, self.temperature = momentum, temperature
        self.register_buffer("queue", F.normalize(torch.randn(size, dim), dim=1))
        self.at = 0

    @staticmethod
    def encoder(dim):
        return nn.Sequential(
            nn.Linear(384, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.LayerNorm(768), nn.Linear(768, dim)
        )

    @torch.no_grad()
    def keys(self, view):
        pairs = list(self.key.parameters()), list(self.query.parameters())
        torch._foreach_lerp_(*pairs, 1 - self.momentum)
        return F.normalize(self.key(view), dim=1)

    def forward(self, first, second):
        q, k = F.normalize(self.query(first), dim=1), self.keys(second)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone().T], 1) / self.temperature
        with torch.no_grad():
            self.queue[self.at : self.at + len(k)] = k
            self.at = (self.at + len(k)) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def views(batch):
    x = torch.randn(batch, 384)
    return x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)


class Runner:
    def __init__(self, accumulate=2, steps=30):
        self.model, self.accumulate, self.steps = MomentumContrast(), accumulate, steps
        self.optimizer = torch.optim.SGD(self.model.query.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step):
        return min(step / 5, 0.5 + 0.5 * math.cos(math.pi * step / self.steps))

    def run(self):
        for step in range(self.steps):
            for _ in range(self.accumulate):
                loss = self.model(*views(256)) / self.accumulate
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.query.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)
            if step % 10 == 0:
                print(step, loss.item() * self.accumulate)


if __name__ == "__main__":
    torch.manual_seed(0)
    Runner().run()
