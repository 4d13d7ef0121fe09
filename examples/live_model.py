"""Measure a model that this process holds, as in a notebook, and leave it as it was.

    python examples/live_model.py

Shows `run(model=…, inputs=…)` in two modes, a function as workload, and the table that a record shows.
"""

import torch
from torch import nn

import cs_systems

CLASSES = 10


def main() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    batch = (torch.randn(8, 3, 32, 32), torch.randint(CLASSES, (8,)))
    before = [parameter.clone() for parameter in model.parameters()]

    def loss(logits, batch):
        return nn.functional.cross_entropy(logits, batch[1])

    record = cs_systems.run(model=model, inputs=batch, loss=loss, optimizer=torch.optim.AdamW, steps=5)
    print(record)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    print(f"\nweights unchanged: {unchanged}\n")
    print(cs_systems.run(workload=lambda: model(batch[0]), name="inference", steps=5))


if __name__ == "__main__":
    main()
