"""A graph attention model with modules that describe their tensors to a logger at debug level."""

import logging

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 3,
    "truth": "The log is off, but its f-strings print a dozen tensors per forward: most of the time.",
    "cause": "logging",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "checkpoint-writing"],
    "healthy": False,
    "place": ["log.debug("],
    "share": 66,
    "remedy": "log.debug with arguments, %s, or a test of isEnabledFor",
    "without": [['        log.debug(f"attention {weights} of {h}, out {out}")\n', ""]],
}

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
log = logging.getLogger("graph")


class GraphAttention(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.project = nn.Linear(n_in, n_out, bias=False)
        self.left, self.right = nn.Linear(n_out, 1), nn.Linear(n_out, 1)

    def forward(self, x, adjacency):
        h = self.project(x)
        scores = F.leaky_relu(self.left(h) + self.right(h).T, 0.2)
        weights = scores.masked_fill(~adjacency, float("-inf")).softmax(1)
        out = weights @ h
        log.debug(f"attention {weights} of {h}, out {out}")
        return out


class GAT(nn.Module):
    def __init__(self, features, classes, heads=4, width=16):
        super().__init__()
        self.first = nn.ModuleList(GraphAttention(features, width) for _ in range(heads))
        self.second = GraphAttention(heads * width, classes)

    def forward(self, x, adjacency):
        x = F.elu(torch.cat([head(x, adjacency) for head in self.first], 1))
        return self.second(F.dropout(x, 0.4, self.training), adjacency)


def graph(nodes=300, features=64, classes=6):
    y = torch.randint(0, classes, (nodes,))
    x = torch.randn(nodes, features) + F.one_hot(y, features)
    adjacency = (torch.rand(nodes, nodes) < 0.02) | (y[:, None] == y) & (torch.rand(nodes, nodes) < 0.05)
    return x, adjacency | adjacency.T | torch.eye(nodes, dtype=torch.bool), y


def main():
    torch.manual_seed(2)
    x, adjacency, y = graph()
    train = torch.rand(len(y)) < 0.5
    model = GAT(64, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for epoch in range(100):
        model.train()
        optimizer.zero_grad()
        logits = model(x, adjacency)
        loss = F.cross_entropy(logits[train], y[train])
        loss.backward()
        optimizer.step()
        if epoch % 25 == 0:
            accuracy = (logits.argmax(1) == y)[~train].float().mean().item()
            log.info("epoch %d loss %.3f accuracy %.3f", epoch, loss.item(), accuracy)


if __name__ == "__main__":
    main()
