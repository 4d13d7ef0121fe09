"""Node classification by graph diffusion: a GCN with a personalised PageRank as its neighbourhood."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

CASE = {
    "generation": 5,
    "truth": "Each epoch, one step, inverts the same matrix of the graph in NumPy and sorts its rows, although the graph never changes.",
    "cause": "host-python",
    "also": ["data-loading"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "np.linalg.inv(",
        "np.argpartition(",
        "np.put_along_axis(",
        "diffusion(graph",
        "degree = ",
        "symmetric = ",
        "sparse / sparse.sum(",
    ],
    "share": 60,
    "remedy": "compute the diffusion matrix once before the first epoch",
    "without": [
        [
            "    for epoch in range(1, epochs + 1):\n        propagation = diffusion(graph)\n",
            "    propagation = diffusion(graph)\n    for epoch in range(1, epochs + 1):\n",
        ]
    ],
}

rng = np.random.default_rng(5)


def blocks(nodes=640, classes=8, inside=0.05, outside=0.004):
    """A stochastic block model with noisy features."""
    label = rng.integers(classes, size=nodes)
    likely = np.where(label[:, None] == label[None, :], inside, outside)
    edges = np.triu(rng.random((nodes, nodes)) < likely, 1)
    features = rng.normal(size=(nodes, 256)).astype(np.float32)
    features[np.arange(nodes), label] += 1.5
    return (edges | edges.T).astype(np.float64), features, label


def diffusion(graph, alpha=0.15, keep=48):
    """Personalised PageRank of all nodes, of which each row keeps its largest entries."""
    loops = graph + np.eye(len(graph))
    degree = loops.sum(1) ** -0.5
    symmetric = degree[:, None] * loops * degree[None, :]
    dense = alpha * np.linalg.inv(np.eye(len(graph)) - (1 - alpha) * symmetric)
    largest = np.argpartition(dense, -keep, axis=1)[:, -keep:]
    sparse = np.zeros_like(dense)
    np.put_along_axis(sparse, largest, np.take_along_axis(dense, largest, 1), 1)
    return torch.from_numpy(sparse / sparse.sum(1, keepdims=True)).float()


class GCN(nn.Module):
    def __init__(self, n_in, hidden, classes, dropout=0.5):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n_in, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, classes)])
        self.dropout = dropout

    def forward(self, x, propagation):
        for layer in self.layers[:-1]:
            x = F.relu(propagation @ layer(F.dropout(x, self.dropout, self.training)))
        return propagation @ self.layers[-1](x)


def fit(graph, features, label, epochs=180):
    x, y = torch.from_numpy(features), torch.from_numpy(label)
    train = torch.rand(len(y)) < 0.3
    model = GCN(x.shape[1], 256, int(y.max()) + 1)
    optimizer = optim.AdamW(model.parameters(), lr=5e-3, weight_decay=5e-3)
    for epoch in range(1, epochs + 1):
        propagation = diffusion(graph)
        optimizer.zero_grad()
        out = model(x, propagation)
        loss = F.cross_entropy(out[train], y[train])
        loss.backward()
        optimizer.step()
        if epoch % 30 == 0:
            right = (out.argmax(1) == y)[~train].float().mean()
            print(f"epoch {epoch:3d} | loss {loss.item():.3f} | other nodes {right.item():.3f}")
    return model


torch.manual_seed(5)
fit(*blocks())
