"""Click prediction on a DataFrame: categorical and numerical columns, one row at a time."""

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 4,
    "truth": "The Dataset takes each row out of a DataFrame by iloc, three times: most of each step waits for the loader.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "requires": ["pandas"],
    "place": [
        "row = self.frame.iloc[index]",
        "torch.tensor(row[self.categorical]",
        "torch.tensor(row[self.numerical]",
        "label = torch.tensor(",
        "for step, (cat, num, y) in enumerate(",
    ],
    "share": 92,
    "remedy": "turn the columns into tensors once, and index these",
    "without": [
        [
            "    loader = DataLoader(",
            "    cat, num = frame[categorical].to_numpy(), frame[numerical].to_numpy()\n    train = torch.utils.data.TensorDataset(torch.tensor(cat), torch.tensor(num, dtype=torch.float32), torch.tensor(frame['clicked'].to_numpy()).float())\n    loader = DataLoader(",
        ]
    ],
}


class ClickDataset(Dataset):
    def __init__(self, frame, categorical, numerical, target):
        self.frame = frame.reset_index(drop=True)
        self.categorical, self.numerical, self.target = categorical, numerical, target

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        row = self.frame.iloc[index]
        cat = torch.tensor(row[self.categorical].values.astype(np.int64))
        num = torch.tensor(row[self.numerical].values.astype(np.float32))
        label = torch.tensor(row[self.target], dtype=torch.float32)
        return cat, num, label


class WideAndDeep(nn.Module):
    def __init__(self, cardinalities, n_numerical, d=16, hidden=(256, 128)):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(n, d) for n in cardinalities])
        self.wide = nn.Linear(n_numerical, 1)
        layers, width = [], d * len(cardinalities) + n_numerical
        for h in hidden:
            layers += [nn.Linear(width, h), nn.BatchNorm1d(h), nn.ReLU()]
            width = h
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, cat, num):
        embedded = [e(cat[:, i]) for i, e in enumerate(self.embeddings)]
        deep = self.deep(torch.cat([*embedded, num], dim=1))
        return (deep + self.wide(num)).squeeze(1)


def make_frame(n=4000):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "site": rng.integers(0, 200, n),
            "device": rng.integers(0, 12, n),
            "hour": rng.integers(0, 24, n),
            "campaign": rng.integers(0, 80, n),
            **{f"x{i}": rng.normal(size=n) for i in range(8)},
        }
    )
    frame["clicked"] = (frame["x0"] + 0.3 * frame["x1"] > 0.5).astype(int)
    return frame


def main():
    torch.manual_seed(0)
    frame = make_frame()
    categorical, numerical = ["site", "device", "hour", "campaign"], [f"x{i}" for i in range(8)]
    train = ClickDataset(frame, categorical, numerical, "clicked")
    loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=0)
    model = WideAndDeep([200, 12, 24, 80], len(numerical))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    model.train()
    for step, (cat, num, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_fn(model(cat, num), y)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:4d}  bce {loss.item():.4f}")


if __name__ == "__main__":
    main()
