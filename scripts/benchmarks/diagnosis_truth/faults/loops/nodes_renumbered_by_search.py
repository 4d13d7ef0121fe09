"""GraphSAGE with sampled neighbourhoods: topics of papers in a citation graph."""

import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "The sampler looks for each node in a list (`in` and `.index`), which takes time in proportion to the nodes sampled so far: quadratic in the size of the subgraph.",
    "cause": "host-python",
    "also": ["data-loading"],
    "never": ["logging", "evaluation", "growth", "no-update", "start-up", "checkpoint-writing", "casts"],
    "healthy": False,
    "place": ["nodes.index(", "if other not in nodes", "def sample(", "sample(links"],
    "share": 42,
    "remedy": "keep a dict from node to position",
    "without": [
        [
            "    nodes = list(seeds)\n",
            "    nodes = list(seeds)\n    where = {node: i for i, node in enumerate(nodes)}\n",
        ],
        [
            "                if other not in nodes:\n",
            "                if other not in where:\n                    where[other] = len(nodes)\n",
        ],
        ["                sources.append(nodes.index(other))\n", "                sources.append(where[other])\n"],
        ["                targets.append(nodes.index(node))\n", "                targets.append(where[node])\n"],
    ],
}


def citations(papers, topics, mean_degree=12):
    rng = random.Random(8)
    topic = [rng.randrange(topics) for _ in range(papers)]
    members = [[i for i in range(papers) if topic[i] == k] for k in range(topics)]
    links = [[] for _ in range(papers)]
    for paper in range(papers):
        for _ in range(mean_degree // 2):
            other = rng.choice(members[topic[paper]]) if rng.random() < 0.7 else rng.randrange(papers)
            links[paper].append(other)
            links[other].append(paper)
    return links, torch.tensor(topic)


def sample(links, seeds, fanouts):
    nodes = list(seeds)
    sources, targets = [], []
    frontier = list(seeds)
    for fanout in fanouts:
        found = []
        for node in frontier:
            for other in random.sample(links[node], min(fanout, len(links[node]))):
                if other not in nodes:
                    nodes.append(other)
                    found.append(other)
                sources.append(nodes.index(other))
                targets.append(nodes.index(node))
        frontier = found
    return torch.tensor(nodes), torch.tensor(sources), torch.tensor(targets)


class SageLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.around = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, sources, targets):
        summed = torch.zeros_like(x).index_add(0, targets, x[sources])
        degree = torch.zeros(len(x)).index_add(0, targets, torch.ones(len(targets))).clamp(min=1)
        return self.own(x) + self.around(summed / degree[:, None])


class Sage(nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.first = SageLayer(inputs, hidden)
        self.second = SageLayer(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x, sources, targets):
        x = F.dropout(F.relu(self.first(x, sources, targets)), 0.3, self.training)
        return self.head(F.relu(self.second(x, sources, targets)))


def train(papers=6000, topics=12, words=200, batch=32, epochs=2):
    links, topic = citations(papers, topics)
    profile = torch.rand(topics, words) < 0.1
    features = (torch.rand(papers, words) < 0.03 + 0.08 * profile[topic]).float()
    model = Sage(words, 192, topics)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        right, seen = 0, 0
        for pick in torch.randperm(papers)[:3200].split(batch):
            nodes, sources, targets = sample(links, pick.tolist(), (6, 4))
            logits = model(features[nodes], sources, targets)[: len(pick)]
            loss = F.cross_entropy(logits, topic[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(1) == topic[pick]).sum().item()
            seen += len(pick)
        print(f"epoch {epoch}: {right / seen:.3f} right")


if __name__ == "__main__":
    torch.manual_seed(8)
    random.seed(8)
    train()
