"""A point-cloud network with a helper of neighbourhoods that functools memoises."""

from functools import lru_cache

import torch
from torch import nn

CASE = {
    "generation": 2,
    "truth": "lru_cache(maxsize=None) keeps the distances of each batch for ever: memory grows by 8 MiB a step, without a hit.",
    "cause": "growth",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "host-python", "small-operators", "periodic-pause"],
    "healthy": False,
    "place": ["@lru_cache(maxsize=None)", "torch.cdist(points, points)", "distances(points)"],
    "share": None,
    "remedy": "remove lru_cache, whose keys are tensors that never come again",
    "without": [["@lru_cache(maxsize=None)\n", ""]],
}


@lru_cache(maxsize=None)
def distances(points):
    return torch.cdist(points, points)


def neighbours(points, k):
    return distances(points).topk(k, largest=False).indices


class EdgeConv(nn.Module):
    def __init__(self, n_in, n_out, k=8):
        super().__init__()
        self.k = k
        self.mlp = nn.Sequential(nn.Linear(2 * n_in, n_out), nn.ReLU(), nn.Linear(n_out, n_out))

    def forward(self, points, features):
        index = neighbours(points, self.k)
        rows = torch.arange(len(points))[:, None, None]
        near = features[rows, index]
        own = features[:, :, None].expand_as(near)
        return self.mlp(torch.cat([own, near - own], -1)).amax(2)


class PointNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = EdgeConv(3, 32)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, points):
        return self.head(self.conv(points, points).amax(1))


def sample(batch, n=512):
    label = torch.randint(0, 3, (batch,))
    points = torch.randn(batch, n, 3)
    points[label == 1] /= points[label == 1].norm(dim=-1, keepdim=True)
    points[label == 2, :, 2] = 0
    return points, label


def main():
    torch.manual_seed(0)
    net = PointNet(3)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    right = seen = 0
    for step in range(1, 61):
        points, label = sample(8)
        logits = net(points)
        loss = nn.functional.cross_entropy(logits, label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        right, seen = right + (logits.argmax(1) == label).sum().item(), seen + len(label)
        if step % 30 == 0:
            print(f"step {step}: loss {loss.item():.3f}, accuracy {right / seen:.2f}")


if __name__ == "__main__":
    main()
