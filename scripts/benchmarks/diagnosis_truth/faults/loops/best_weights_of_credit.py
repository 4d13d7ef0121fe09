"""Credit default from tables: early stopping keeps the weights with the lowest validation loss for the final test."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "state_dict() returns the living tensors, so the weights kept as best go on changing with each step, and the test uses the last, overfitted ones. No profile of time or memory can show it.",
    "cause": "kept-by-reference",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "growth",
        "host-python",
        "start-up",
        "checkpoint-writing",
        "model-copies",
        "small-operators",
    ],
    "healthy": False,
    "place": ["best, kept = held, model.state_dict()", "model.load_state_dict(kept)"],
    "remedy": "copy.deepcopy(model.state_dict())",
    "without": [
        [
            "            best, kept = held, model.state_dict()\n",
            "            best, kept = held, {k: v.clone() for k, v in model.state_dict().items()}\n",
        ]
    ],
}


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.both = nn.Linear(width, 2 * width)

    def forward(self, x):
        value, gate = self.both(x).chunk(2, -1)
        return x + value * torch.sigmoid(gate)


def clients(count, rule):
    x = torch.randn(count, 40)
    score = x @ rule + 0.8 * x[:, 0] * x[:, 1] - 1.0 + 1.5 * torch.randn(count)
    return x, (score > 0).float()


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), y).item()


def main(epochs=20, batch=128):
    torch.manual_seed(9)
    rule = 0.3 * torch.randn(40)
    train_x, train_y = clients(1536, rule)
    valid, test = clients(400, rule), clients(4000, rule)
    model = nn.Sequential(nn.Linear(40, 256), Gate(256), Gate(256), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best, kept = float("inf"), None
    for epoch in range(epochs):
        model.train()
        for pick in torch.randperm(len(train_y)).split(batch):
            loss = F.binary_cross_entropy_with_logits(model(train_x[pick]).squeeze(1), train_y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        held = validate(model, *valid)
        if held < best:
            best, kept = held, model.state_dict()
    model.load_state_dict(kept)
    print(f"lowest validation loss {best:.3f}, test loss of the kept weights {validate(model, *test):.3f}")


if __name__ == "__main__":
    main()
