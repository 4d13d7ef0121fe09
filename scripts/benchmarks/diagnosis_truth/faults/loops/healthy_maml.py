"""Model-agnostic meta-learning: each step adapts the network to four tasks and goes back through the adaptation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

CASE = {
    "generation": 5,
    "truth": "Four tasks with two inner steps each and second derivatives are the method; convolutions of 30 pictures take most of the time.",
    "cause": None,
    "also": [],
    "never": ["small-operators", "duplicate-forward", "repeated-backward", "host-python", "growth", "recomputation"],
    "healthy": True,
}


@dataclass
class Config:
    ways: int = 6
    shots: int = 5
    tasks: int = 4
    inner_steps: int = 2
    inner_lr: float = 0.05
    meta_lr: float = 2e-3
    width: int = 24
    side: int = 28
    meta_steps: int = 20


class ConvNet(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        blocks, n_in = [], 1
        for stride in (1, 1, 2, 2):
            blocks += [nn.Conv2d(n_in, cfg.width, 3, stride=stride, padding=1), nn.ReLU()]
            n_in = cfg.width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(cfg.width * (cfg.side // 4) ** 2, cfg.ways)

    def forward(self, x):
        return self.classify(self.blocks(x).flatten(1))


class Tasks:
    """Classes of random strokes, with new classes in each task."""

    def __init__(self, cfg: Config):
        self.cfg, self.generator = cfg, torch.Generator().manual_seed(17)

    def one(self):
        c = self.cfg
        coarse = torch.randn(c.ways, 1, 7, 7, generator=self.generator)
        prototypes = F.interpolate(coarse, size=(c.side, c.side), mode="bilinear", align_corners=False)
        labels = torch.arange(c.ways).repeat(2 * c.shots)
        pictures = prototypes[labels] + 0.5 * torch.randn(len(labels), 1, c.side, c.side, generator=self.generator)
        half = c.ways * c.shots
        return (pictures[:half], labels[:half]), (pictures[half:], labels[half:])


class MetaLearner:
    def __init__(self, cfg: Config):
        self.cfg, self.net = cfg, ConvNet(cfg)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=cfg.meta_lr)

    def adapted(self, pictures, labels):
        """The parameters after the inner steps, with their graph."""
        weights = dict(self.net.named_parameters())
        for _ in range(self.cfg.inner_steps):
            loss = F.cross_entropy(functional_call(self.net, weights, (pictures,)), labels)
            gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            weights = {name: w - self.cfg.inner_lr * g for (name, w), g in zip(weights.items(), gradients)}
        return weights

    def meta_step(self, tasks):
        losses, hits = [], []
        for support, (pictures, labels) in tasks:
            logits = functional_call(self.net, self.adapted(*support), (pictures,))
            losses.append(F.cross_entropy(logits, labels))
            hits.append((logits.argmax(1) == labels).float().mean())
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), torch.stack(hits).mean()


def main(cfg: Config = Config()):
    torch.manual_seed(0)
    source, learner = Tasks(cfg), MetaLearner(cfg)
    for step in range(cfg.meta_steps):
        loss, accuracy = learner.meta_step([source.one() for _ in range(cfg.tasks)])
        if step % 5 == 0:
            print(f"meta step {step}: loss {loss:.3f}, accuracy after adaptation {accuracy:.2f}")


if __name__ == "__main__":
    main()
