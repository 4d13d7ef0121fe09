"""Link prediction on a citation graph by a two-layer graph network, with negative edges for each epoch."""

import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 6,
    "truth": "Negative edges are drawn one by one in plain Python and looked up in a set: most of an epoch, which is one step.",
    "cause": "host-python",
    "also": ["data-loading"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "self.rng.randrange(",
        "in self.known",
        "while len(found) < count",
        "found.append(",
        "u, v = ",
        "torch.tensor(found)",
        "negative = ",
    ],
    "share": 52,
    "remedy": "draw all pairs at once by torch.randint and drop the few that are edges",
    "without": [
        [
            "        found = []\n        while len(found) < count:\n",
            "        return torch.randint(self.nodes, (2, count))\n        found = []\n        while len(found) < count:\n",
        ]
    ],
}


class Graph:
    def __init__(self, nodes, edges, features, seed=5):
        g = torch.Generator().manual_seed(seed)
        self.nodes, self.rng = nodes, random.Random(seed)
        group = torch.randint(12, (nodes,), generator=g)
        ends = torch.randint(nodes, (2, 8 * edges), generator=g)
        alike = group[ends[0]] == group[ends[1]]
        self.edges = ends[:, alike][:, :edges]
        self.x = torch.randn(12, features, generator=g)[group] + torch.randn(nodes, features, generator=g)
        self.known = set(zip(*self.edges.tolist()))
        both = torch.cat([self.edges, self.edges.flip(0), torch.arange(nodes).expand(2, -1)], 1)
        degree = torch.bincount(both[0], minlength=nodes).float()
        weight = (degree[both[0]] * degree[both[1]]).rsqrt()
        self.adjacency = torch.sparse_coo_tensor(both, weight, (nodes, nodes)).coalesce().to_sparse_csr()

    def negatives(self, count):
        """Pairs without an edge."""
        found = []
        while len(found) < count:
            u, v = self.rng.randrange(self.nodes), self.rng.randrange(self.nodes)
            if u != v and (u, v) not in self.known and (v, u) not in self.known:
                found.append((u, v))
        return torch.tensor(found).t()


class Encoder(nn.Module):
    def __init__(self, features, hidden, out):
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, out)

    def forward(self, x, adjacency):
        h = torch.relu(torch.sparse.mm(adjacency, self.first(x)))
        return torch.sparse.mm(adjacency, self.second(F.dropout(h, 0.3, self.training)))


def scores(z, pairs):
    return (z[pairs[0]] * z[pairs[1]]).sum(-1)


torch.manual_seed(0)
graph = Graph(nodes=4000, edges=24_000, features=96)
model = Encoder(96, 64, 32)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

for epoch in range(1, 71):
    model.train()
    z = model(graph.x, graph.adjacency)
    negative = graph.negatives(graph.edges.shape[1])
    logits = torch.cat([scores(z, graph.edges), scores(z, negative)])
    labels = torch.cat([torch.ones(graph.edges.shape[1]), torch.zeros(negative.shape[1])])
    loss = F.binary_cross_entropy_with_logits(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        accuracy = ((logits > 0) == labels.bool()).float().mean()
        print(f"epoch {epoch:03d}  loss {loss.item():.4f}  accuracy {accuracy.item():.3f}")
