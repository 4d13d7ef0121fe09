"""Graph network on a random graph that adds up messages node by node."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 2,
    "truth": "Each layer gathers the neighbours of each of 300 nodes by an indexing and a mean of its own, in Python.",
    "cause": "small-operators",
    "also": ["host-python", "launch-bound"],
    "never": ["start-up", "data-loading", "evaluation", "growth"],
    "healthy": False,
    "place": ["torch.stack([", "x[neighbours].mean(0)", "self.aggregate(", "for neighbours in"],
    "share": 83,
    "remedy": "add up all messages in one index_add or scatter call, or a sparse product",
    "without": [
        [
            "        return torch.stack([x[neighbours].mean(0) for neighbours in self.neighbours])",
            "        out = torch.zeros_like(x).index_add(0, self.to, x[self.of])\n        return out / self.degree",
        ],
        [
            "        self.neighbours = neighbours\n",
            "        self.to = torch.cat([torch.full((len(n),), i) for i, n in enumerate(neighbours)])\n        self.of = torch.cat(neighbours)\n        self.degree = torch.tensor([[float(len(n))] for n in neighbours])\n",
        ],
    ],
}


class SageLayer(nn.Module):
    def __init__(self, n_in, n_out, neighbours):
        super().__init__()
        self.neighbours = neighbours
        self.own, self.others = nn.Linear(n_in, n_out), nn.Linear(n_in, n_out)

    def aggregate(self, x):
        return torch.stack([x[neighbours].mean(0) for neighbours in self.neighbours])

    def forward(self, x):
        return self.own(x) + self.others(self.aggregate(x))


class Sage(nn.Module):
    def __init__(self, n_in, hidden, classes, neighbours):
        super().__init__()
        self.first, self.second = SageLayer(n_in, hidden, neighbours), SageLayer(hidden, classes, neighbours)

    def forward(self, x):
        return self.second(F.dropout(F.relu(self.first(x)), 0.5, self.training))


def make_graph(nodes=300, degree=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    neighbours = [torch.randint(0, nodes, (degree + i % 4,), generator=g) for i in range(nodes)]
    return torch.randn(nodes, 128, generator=g), torch.randint(0, 7, (nodes,), generator=g), neighbours


def main():
    torch.manual_seed(0)
    x, y, neighbours = make_graph()
    train_mask = torch.rand(len(x)) < 0.6
    model = Sage(x.shape[1], 256, 7, neighbours)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, 41):
        model.train()
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        if epoch % 20 == 0:
            accuracy = (out.argmax(1) == y)[train_mask].float().mean().item()
            print(f"Epoch: {epoch:03d}, Loss: {loss.item():.4f}, Train: {accuracy:.4f}")


if __name__ == "__main__":
    main()
