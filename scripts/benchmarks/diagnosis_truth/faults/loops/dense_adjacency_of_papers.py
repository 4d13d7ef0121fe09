"""Semi-supervised classification of papers by their field, with a three-layer graph convolution over citations."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "The normalised adjacency of 1300 papers, each with about eight citations, is a dense matrix: each layer multiplies 1300 x 1300 numbers, of which more than 99 % are zeros, forward and backward.",
    "cause": "slow-products",
    "also": ["fp32-products"],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "host-python",
        "small-operators",
        "no-update",
        "start-up",
    ],
    "healthy": False,
    "place": ["adjacency @ self.linear(x)", "return scale[:, None] * links * scale", "links = torch.eye(count)"],
    "share": 39,
    "remedy": "keep the adjacency as a sparse tensor, or gather and add along the edges",
    "without": [
        [
            "    return scale[:, None] * links * scale\n",
            "    return (scale[:, None] * links * scale).to_sparse()\n",
        ]
    ],
}


def citations(count=1300, fields=6, words=200, per_paper=4):
    """Papers cite mostly within their own field; each has a bag of words that hints at the field."""
    field = torch.randint(fields, (count,))
    source = torch.arange(count).repeat_interleave(per_paper)
    target = torch.randint(count, (count * per_paper,))
    for _ in range(4):
        stray = (field[source] != field[target]) & (torch.rand(len(target)) < 0.7)
        target = torch.where(stray, torch.randint(count, (len(target),)), target)
    topics = torch.rand(fields, words) ** 6
    bag = (torch.rand(count, words) < 0.05 + 0.15 * topics[field]).float()
    return source, target, bag, field


def propagation(source, target, count):
    links = torch.eye(count)
    links[source, target] = 1.0
    links[target, source] = 1.0
    scale = links.sum(1).rsqrt()
    return scale[:, None] * links * scale


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, adjacency):
        return adjacency @ self.linear(x)


class PaperNet(nn.Module):
    def __init__(self, words, fields, width=64, dropout=0.4):
        super().__init__()
        self.first = GraphConvolution(words, width)
        self.second = GraphConvolution(width, width)
        self.last = GraphConvolution(width, fields)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, adjacency):
        x = self.dropout(F.relu(self.first(x, adjacency)))
        x = x + self.dropout(F.relu(self.second(x, adjacency)))
        return self.last(x, adjacency)


def main(epochs=80):
    torch.manual_seed(3)
    source, target, bag, field = citations()
    adjacency = propagation(source, target, len(field))
    order = torch.randperm(len(field))
    labelled, held_out = order[:200], order[200:]
    net = PaperNet(bag.shape[1], 6)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=5e-4)
    for epoch in range(1, epochs + 1):
        logits = net(bag, adjacency)
        loss = F.cross_entropy(logits[labelled], field[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 20 == 0:
            right = (logits[held_out].argmax(1) == field[held_out]).float().mean()
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}  held-out accuracy {right:.3f}")


if __name__ == "__main__":
    main()
