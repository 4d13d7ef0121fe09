"""Segmentation by a PointNet of point clouds that lie in a file of JSON lines."""

import argparse
import json
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 5,
    "truth": "__getitem__ parses the JSON text of its cloud each time, thousands of numbers, which takes half of the loop.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "json.loads(",
        "for points, labels in loader",
        'torch.tensor(record["points"])',
        'torch.tensor(record["labels"])',
        "file.readline()",
        "def __getitem__",
    ],
    "share": 48,
    "remedy": "write the clouds once as arrays (numpy, torch.save) and index these, or keep what was parsed",
    "without": [
        [
            "        with open(self.path) as file:\n            file.seek(self.offsets[index])\n            record = json.loads(file.readline())\n",
            "        if not hasattr(self, 'records'):\n"
            "            self.records = [json.loads(line) for line in open(self.path)]\n"
            "            self.kept = [(torch.tensor(r['points']), torch.tensor(r['labels'])) for r in self.records]\n",
        ],
        [
            '        points, labels = torch.tensor(record["points"]), torch.tensor(record["labels"])\n',
            "        points, labels = self.kept[index]\n",
        ],
    ],
}


def write_clouds(path, clouds, size, generator):
    """Clouds of a floor, a ball and a pole, as a scanner's export would have them."""
    with open(path, "w") as file:
        for _ in range(clouds):
            labels = torch.randint(3, (size,), generator=generator)
            raw = torch.randn(size, 3, generator=generator)
            floor = raw * torch.tensor([2.0, 2.0, 0.05])
            ball = raw / raw.norm(dim=1, keepdim=True) * 0.6 + 0.5
            pole = raw * torch.tensor([0.05, 0.05, 1.0]) - 0.5
            points = torch.stack([floor, ball, pole])[labels, torch.arange(size)]
            colour = torch.rand(size, 3, generator=generator)
            rows = torch.cat([points, colour], 1).tolist()
            file.write(json.dumps({"sensor": "A7", "points": rows, "labels": labels.tolist()}) + "\n")


class Clouds(Dataset):
    def __init__(self, path):
        self.path = path
        self.offsets = [0]
        with open(path, "rb") as file:
            for line in file:
                self.offsets.append(self.offsets[-1] + len(line))
        self.offsets.pop()

    def __len__(self):
        return len(self.offsets)

    def __getitem__(self, index):
        with open(self.path) as file:
            file.seek(self.offsets[index])
            record = json.loads(file.readline())
        points, labels = torch.tensor(record["points"]), torch.tensor(record["labels"])
        angle = 6.28 * torch.rand(())
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
        return torch.cat([points[:, :2] @ turn.T, points[:, 2:]], 1), labels


class PointNet(nn.Module):
    def __init__(self, n_in=6, width=64, classes=3):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, 2 * width), nn.GELU())
        self.head = nn.Sequential(nn.Linear(4 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, classes))

    def forward(self, points):
        each = self.local(points)
        whole = each.max(dim=1, keepdim=True).values
        return self.head(torch.cat([each, whole.expand_as(each)], dim=-1))


def run(args):
    generator = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "train.jsonl")
        write_clouds(path, args.clouds, args.points, generator)
        loader = DataLoader(Clouds(path), args.batch, shuffle=True, drop_last=True)
        model = PointNet()
        optimizer = torch.optim.AdamW(model.parameters(), args.lr)
        criterion = nn.CrossEntropyLoss()
        for epoch in range(args.epochs):
            right = seen = 0
            for points, labels in loader:
                scores = model(points)
                loss = criterion(scores.flatten(0, 1), labels.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += (scores.argmax(-1) == labels).sum()
                seen += labels.numel()
            print(f"epoch {epoch}: {right / seen:.3f} of the points")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--clouds", type=int, default=96)
    parser.add_argument("--points", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=4)
    run(parser.parse_args())
