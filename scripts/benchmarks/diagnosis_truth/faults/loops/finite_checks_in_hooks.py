"""A deep tabular network with hooks that look for NaN in each output, left from a bad week."""

import torch
from torch import nn

CASE = {
    "generation": 2,
    "truth": "A forward hook on each of 200 modules checks its output for NaN and infinity, over a third of the step.",
    "cause": "host-python",
    "also": ["small-operators", "host-sync", "logging", "anomaly-detection"],
    "never": ["start-up", "data-loading", "evaluation", "growth"],
    "healthy": False,
    "place": [
        "torch.isfinite(output).all()",
        "torch.isnan(output).any()",
        "torch.isinf(output).any()",
        "output.abs().max()",
        "logits = model(x)",
    ],
    "share": 40,
    "remedy": "remove the hooks, or check the loss alone",
    "without": [["    watch(model)\n", ""]],
}


class ResidualMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Tabular(nn.Module):
    def __init__(self, features, classes, width=48, depth=40):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(ResidualMLP(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NumericalError(RuntimeError):
    pass


def check(module, inputs, output):
    if torch.isnan(output).any() or torch.isinf(output).any():
        raise NumericalError(f"bad values after {type(module).__name__}")
    if output.abs().max() > 1e4:
        print(f"large activations after {type(module).__name__}")


def watch(model):
    for module in model.modules():
        module.register_forward_hook(check)


def main():
    torch.manual_seed(0)
    table = torch.randn(5000, 24)
    target = (table[:, :8].sum(1) > 0).long() + (table[:, 8:16].sum(1) > 0).long()
    model = Tabular(24, 3)
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, foreach=True)
    for step in range(50):
        rows = torch.randint(0, len(table), (64,))
        x, y = table[rows], target[rows]
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
