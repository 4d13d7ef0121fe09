"""Message passing on graphs, with gathers and index_add over edges, and a readout per graph."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "Messages of all edges are computed at once and summed by index_add; the products over edges take the time.",
    "cause": None,
    "also": [],
    "never": ["index-backward", "small-operators", "host-python", "data-loading", "elementwise-chain", "padding"],
    "healthy": True,
}


class EdgeConv(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.update_fn = nn.GRUCell(d, d)

    def forward(self, h, source, target):
        m = self.message(torch.cat([h[source], h[target]], dim=1))
        received = torch.zeros_like(h).index_add(0, target, m)
        return self.update_fn(received, h)


class GraphNet(nn.Module):
    def __init__(self, n_types=16, d=96, rounds=3, out=1):
        super().__init__()
        self.embed = nn.Embedding(n_types, d)
        self.rounds = nn.ModuleList([EdgeConv(d) for _ in range(rounds)])
        self.readout = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, out))

    def forward(self, graph):
        h = self.embed(graph["types"])
        for layer in self.rounds:
            h = layer(h, graph["source"], graph["target"])
        pooled = torch.zeros(graph["size"], h.shape[1]).index_add(0, graph["of_graph"], h)
        return self.readout(pooled).squeeze(1)


def random_graphs(size, nodes=24, degree=6):
    n = size * nodes
    of_graph = torch.arange(size).repeat_interleave(nodes)
    source = torch.arange(n).repeat_interleave(degree)
    target = of_graph[source] * nodes + torch.randint(0, nodes, (n * degree,))
    types = torch.randint(0, 16, (n,))
    label = torch.zeros(size).index_add(0, of_graph, (types == 3).float())
    return {"types": types, "source": source, "target": target, "of_graph": of_graph, "size": size}, label


class Experiment:
    def __init__(self, lr=1e-3):
        torch.manual_seed(0)
        self.model = GraphNet()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.best = float("inf")

    def train(self, epochs=2, batches=14, size=20):
        for epoch in range(epochs):
            total = 0.0
            for _ in range(batches):
                graph, label = random_graphs(size)
                loss = F.huber_loss(self.model(graph), label)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.item()
            self.best = min(self.best, total / batches)
            print(f"epoch {epoch + 1:02d} | huber {total / batches:.4f} | best {self.best:.4f}")


if __name__ == "__main__":
    Experiment().train()
