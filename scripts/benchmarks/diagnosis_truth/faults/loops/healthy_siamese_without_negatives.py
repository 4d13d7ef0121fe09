"""Self-supervised learning of tabular rows: two views, one encoder, a predictor, and no negatives."""

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

CASE = {
    "generation": 14,
    "truth": "The encoder runs twice in a step, on two different views, and each target is detached, without which the representation collapses. Linear layers take the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "cut-gradients",
        "unused-gradients",
        "data-loading",
        "same-randomness",
        "host-python",
    ],
    "healthy": True,
}


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


class Siamese(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.encoder = mlp(columns, 512, 512, 256)
        self.predictor = nn.Sequential(mlp(256, 64), nn.ReLU(), nn.Linear(64, 256))

    def forward(self, a, b):
        za, zb = self.encoder(a), self.encoder(b)
        pa, pb = self.predictor(za), self.predictor(zb)
        return -0.5 * (cosine_similarity(pa, zb.detach()).mean() + cosine_similarity(pb, za.detach()).mean())


class Views:
    """Rows of a table with a third of their columns hidden, twice and differently."""

    def __init__(self, table, batch, steps):
        self.table, self.batch, self.steps = table, batch, steps

    def __iter__(self):
        for _ in range(self.steps):
            rows = self.table[torch.randint(len(self.table), (self.batch,))]
            yield rows * (torch.rand_like(rows) > 0.33), rows * (torch.rand_like(rows) > 0.33)


if __name__ == "__main__":
    torch.manual_seed(19)
    table = torch.randn(6000, 16) @ torch.randn(16, 128) / 4
    model = Siamese(128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4, fused=True)
    for i, (a, b) in enumerate(Views(table, 768, 80)):
        loss = model(a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 20 == 19:
            print(f"step {i + 1}: {loss.item():.4f}")
