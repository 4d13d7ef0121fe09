"""Next item of a shop's visitors: a recurrent network reads the sessions, which a pandas table of clicks holds."""

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 15,
    "truth": "The dataset compares the session number of all clicks with the wanted one, and sorts the rows found, for each sample that it returns: 43% of the loop's time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "dense-gradient", "no-update"],
    "healthy": False,
    "place": [
        'rows = self.clicks[self.clicks["session"] == self.sessions[index]].sort_values("time")',
        "def __getitem__(self, index):",
        'items = rows["item"].to_numpy()',
    ],
    "share": 43,
    "remedy": "group the clicks by session once, and let the dataset look the groups up",
    "without": [
        [
            '        self.sessions = clicks["session"].unique()\n',
            '        self.sessions = clicks["session"].unique()\n'
            '        self.groups = dict(tuple(clicks.sort_values("time").groupby("session")))\n',
        ],
        [
            '        rows = self.clicks[self.clicks["session"] == self.sessions[index]].sort_values("time")\n',
            "        rows = self.groups[self.sessions[index]]\n",
        ],
    ],
}

ITEMS, LENGTH = 600, 20


def make_clicks(sessions=2500, seed=5):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, ITEMS, (sessions, 1))
    items = (first + np.cumsum(rng.integers(0, 6, (sessions, LENGTH)), axis=1)) % ITEMS
    frame = pd.DataFrame(
        {
            "session": np.repeat(np.arange(sessions), LENGTH),
            "time": rng.uniform(0, 300, (sessions, 1)).repeat(LENGTH, 1).ravel() + np.tile(np.arange(LENGTH), sessions),
            "item": items.ravel(),
        }
    )
    return frame.sort_values("time", ignore_index=True)


class Sessions(Dataset):
    def __init__(self, clicks):
        self.clicks = clicks
        self.sessions = clicks["session"].unique()

    def __len__(self):
        return len(self.sessions)

    def __getitem__(self, index):
        rows = self.clicks[self.clicks["session"] == self.sessions[index]].sort_values("time")
        items = rows["item"].to_numpy()
        return torch.from_numpy(items[:-1].copy()), torch.from_numpy(items[1:].copy())


class Recommender(nn.Module):
    def __init__(self, dim=64, hidden=128):
        super().__init__()
        self.embed = nn.Embedding(ITEMS, dim)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.out = nn.Linear(hidden, ITEMS)

    def forward(self, items):
        hidden, _ = self.gru(self.embed(items))
        return self.out(hidden)


def main(epochs=2):
    torch.manual_seed(5)
    loader = DataLoader(Sessions(make_clicks()), batch_size=48, shuffle=True, drop_last=True)
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        total = 0.0
        for seen, wanted in loader:
            logits = model(seen)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: cross entropy {total / len(loader):.3f}")


if __name__ == "__main__":
    main()
