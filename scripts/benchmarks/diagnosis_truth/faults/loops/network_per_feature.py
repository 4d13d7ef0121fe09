"""A neural additive model: the sum of one small network for each column of a table."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 4,
    "truth": "Each of 80 columns has a network of its own, called in turn on one column: some 500 tiny operators in forward alone.",
    "cause": "small-operators",
    "also": ["host-python", "unfused-optimizer"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "logging"],
    "healthy": False,
    "place": [
        "for i, net in enumerate(self.feature_nets)",
        "contributions = [",
        "net(x[:, i : i + 1])",
        "return self.net(",
        "x = self.centre",
        "self.nam(x)",
        "model(x)",
        "torch.stack(contributions",
    ],
    "share": 84,
    "remedy": "one grouped layer for all columns: torch.bmm, or Conv1d with groups",
    "without": [
        [
            "        contributions = [net(x[:, i : i + 1]) for i, net in enumerate(self.feature_nets)]\n        parts = torch.stack(contributions, dim=-1)\n",
            "        parts = self.feature_nets[0](x.reshape(-1, 1)).reshape(len(x), -1, x.shape[1])\n",
        ],
    ],
}


class ExpUnit(nn.Module):
    """exp(w) * (x - b), clipped to [0, 1]."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_in))
        nn.init.trunc_normal_(self.weight, mean=1.0, std=0.5)
        nn.init.trunc_normal_(self.bias, std=0.5)

    def forward(self, x):
        x = self.centre(x) @ self.weight.exp()
        return x.clamp(0, 1)

    def centre(self, x):
        return x - self.bias


class FeatureNet(nn.Module):
    def __init__(self, hidden=(24, 16), dropout=0.1):
        super().__init__()
        self.net = nn.Sequential(
            ExpUnit(1, hidden[0]),
            nn.Dropout(dropout),
            nn.Linear(hidden[0], hidden[1]),
            nn.ReLU(),
            nn.Linear(hidden[1], 1, bias=False),
        )

    def forward(self, x):
        return self.net(x)


class NeuralAdditiveModel(nn.Module):
    def __init__(self, n_features, feature_dropout=0.05):
        super().__init__()
        self.feature_nets = nn.ModuleList(FeatureNet() for _ in range(n_features))
        self.feature_dropout = nn.Dropout(feature_dropout)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        contributions = [net(x[:, i : i + 1]) for i, net in enumerate(self.feature_nets)]
        parts = torch.stack(contributions, dim=-1)
        parts = self.feature_dropout(parts)
        return parts.sum(-1).squeeze(-1) + self.bias, parts


def train(args):
    torch.manual_seed(args.seed)
    x = torch.rand(args.rows, args.features) * 2 - 1
    target = (torch.sin(3 * x[:, 0]) + x[:, 1] ** 2 - x[:, 2:6].abs().sum(1) > -1).float()
    loader = DataLoader(TensorDataset(x, target), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = NeuralAdditiveModel(args.features)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        total, correct, seen = 0.0, 0, 0
        for x, target in loader:
            optimizer.zero_grad()
            logits, parts = model(x)
            loss = criterion(logits, target) + args.l2 * parts.pow(2).mean()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
            correct += ((logits > 0).float() == target).sum().item()
            seen += len(x)
        scheduler.step()
        print(f"[{epoch}] loss={total / seen:.4f} acc={correct / seen:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2560)
    parser.add_argument("--features", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())
