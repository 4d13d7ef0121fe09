"""A recurrent network that logs its gradients as text in every step."""

import json
import os
import tempfile

import torch
from torch import nn

CASE = {
    "truth": "All gradients are written as JSON text, with fsync, in every step: that is nearly all of the time.",
    "cause": "logging",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation", "checkpoint-writing"],
    "healthy": False,
}


def main():
    torch.manual_seed(11)
    model = nn.LSTM(32, 48, batch_first=True)
    head = nn.Linear(48, 6)
    params = list(model.parameters()) + list(head.parameters())
    opt = torch.optim.Adagrad(params, lr=0.01)
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.jsonl"), "w") as log:
        for step in range(50):
            x, y = torch.randn(8, 12, 32), torch.randint(0, 6, (8,))
            out, _ = model(x)
            loss = nn.functional.cross_entropy(head(out[:, -1]), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            record = {"step": step, "loss": loss.item(), "grads": [p.grad.tolist() for p in params]}
            log.write(json.dumps(record) + "\n")
            log.flush()
            os.fsync(log.fileno())


if __name__ == "__main__":
    main()
