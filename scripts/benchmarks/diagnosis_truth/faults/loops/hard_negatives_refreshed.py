"""A two-tower retriever, trained on hard negatives that are mined again from the whole corpus."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "Every seventh step encodes the whole corpus again and sorts its scores, longer than the seven steps.",
    "cause": "periodic-pause",
    "also": ["evaluation", "host-python"],
    "never": ["start-up", "data-loading", "growth", "small-operators", "logging", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "self.refresh(",
        "for chunk in self.corpus.split(",
        "self.model.passage(chunk)",
        "scores = questions @ passages.T",
        "self.negatives = ",
        "torch.cat(",
        "return F.normalize(",
        "self.model.question(",
    ],
    "share": 65,
    "remedy": "refresh less often, or in another process with a copy of the weights",
    "without": [["            if self.step % self.every == 0:\n", "            if self.step == 0:\n"]],
}


class Tower(nn.Module):
    def __init__(self, n_tokens, d, out):
        super().__init__()
        self.bag = nn.EmbeddingBag(n_tokens, d, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.LayerNorm(2 * d), nn.Linear(2 * d, out))

    def forward(self, tokens):
        return F.normalize(self.mlp(self.bag(tokens)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, n_tokens=2000, d=96, out=64):
        super().__init__()
        self.question, self.passage = Tower(n_tokens, d, out), Tower(n_tokens, d, out)


class AnceTrainer:
    """Trainer with negatives from an index of its own embeddings (ANCE)."""

    def __init__(self, model, questions, corpus, positives, args):
        self.model, self.questions, self.corpus, self.positives = model, questions, corpus, positives
        self.every, self.batch_size, self.temperature = args.refresh, args.batch_size, args.temperature
        self.optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
        self.negatives, self.step = None, 0

    @torch.no_grad()
    def refresh(self, topk=20):
        self.model.eval()
        passages = torch.cat([self.model.passage(chunk) for chunk in self.corpus.split(512)])
        questions = self.model.question(self.questions)
        scores = questions @ passages.T
        scores.scatter_(1, self.positives[:, None], -1.0)
        self.negatives = scores.topk(topk, dim=1).indices
        self.model.train()

    def train(self, steps):
        for _ in range(steps):
            if self.step % self.every == 0:
                self.refresh()
            chosen = torch.randint(len(self.questions), (self.batch_size,))
            hard = self.negatives[chosen, torch.randint(20, (self.batch_size,))]
            q = self.model.question(self.questions[chosen])
            p = self.model.passage(self.corpus[torch.cat([self.positives[chosen], hard])])
            loss = F.cross_entropy(q @ p.T / self.temperature, torch.arange(self.batch_size))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % 35 == 0:
                print(f"{self.step} {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=105)
    parser.add_argument("--refresh", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.manual_seed(0)
    corpus = torch.randint(0, 2000, (6000, 24))
    positives = torch.randint(0, 6000, (1500,))
    questions = corpus[positives][:, torch.randperm(24)[:10]]
    AnceTrainer(TwoTower(), questions, corpus, positives, args).train(args.steps)


if __name__ == "__main__":
    main()
