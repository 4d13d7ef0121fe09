"""A loop that writes a checkpoint with fsync after every eighth step."""

import os
import tempfile

import torch
from torch import nn

CASE = {
    "truth": "torch.save of the model (80 MB, with fsync) after every eighth step takes most of the time.",
    "cause": "checkpoint-writing",
    "also": ["periodic-pause"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}


def save(folder, model, optimizer, step):
    path = os.path.join(folder, "last.pt")
    with open(path, "wb") as f:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f)
        f.flush()
        os.fsync(f.fileno())


def main():
    torch.manual_seed(0)
    embedding = nn.Embedding(80000, 256).requires_grad_(False)
    model = nn.Sequential(embedding, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, 41):
            x, y = torch.randint(0, 80000, (16, 24)), torch.randint(0, 16, (16,))
            loss = nn.functional.cross_entropy(model(x).mean(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 8 == 0:
                save(folder, model, optimizer, step)
                print("saved", step, loss.item())


if __name__ == "__main__":
    main()
