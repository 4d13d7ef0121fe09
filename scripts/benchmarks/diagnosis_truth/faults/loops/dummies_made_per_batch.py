"""Prices of used cars from a table with categories, read with pandas."""

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Each batch is cut out of the table and its categories become columns with get_dummies and reindex, although the table never changes: 53% of the loop's time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "dense-gradient"],
    "healthy": False,
    "place": [
        "rows = table.iloc[order[start : start + size]]",
        "wide = pd.get_dummies(rows[CATEGORIES]).reindex(columns=columns, fill_value=0)",
        "numbers = (rows[NUMBERS] - middle) / spread",
        "features = np.concatenate([wide.to_numpy(np.float32), numbers.to_numpy(np.float32)], axis=1)",
        "for features, prices in batches(table, columns, size):",
        "yield torch.from_numpy(features), torch.from_numpy(rows.price.to_numpy(np.float32))",
    ],
    "share": 53,
    "remedy": "make the columns of the whole table once, before training, as one tensor",
    "requires": ["pandas"],
    "without": [
        [
            "    order = np.random.permutation(len(table))\n",
            "    order = np.random.permutation(len(table))\n"
            "    if 'whole' not in globals():\n"
            "        wide = pd.get_dummies(table[CATEGORIES]).reindex(columns=columns, fill_value=0)\n"
            "        numbers = (table[NUMBERS] - middle) / spread\n"
            "        features = np.concatenate([wide.to_numpy(np.float32), numbers.to_numpy(np.float32)], axis=1)\n"
            "        globals()['whole'] = torch.from_numpy(features), torch.from_numpy(table.price.to_numpy(np.float32))\n"
            "    for start in range(0, len(order), size):\n"
            "        pick = torch.from_numpy(order[start : start + size])\n"
            "        yield whole[0][pick], whole[1][pick]\n"
            "    return\n",
        ],
    ],
}

CATEGORIES = ["maker", "fuel", "colour", "region", "body"]
NUMBERS = ["age", "distance", "power"]


def cars(count):
    """Return a table of cars whose price follows from what it tells about them."""
    rng = np.random.default_rng(66)
    names = {"maker": 40, "fuel": 5, "colour": 14, "region": 50, "body": 9}
    table = pd.DataFrame({name: [f"{name}{k}" for k in rng.integers(0, n, count)] for name, n in names.items()})
    table["age"] = rng.integers(0, 20, count)
    table["distance"] = table.age * rng.normal(12, 3, count).clip(1)
    table["power"] = rng.normal(90, 30, count).clip(40)
    worth = table.maker.str[5:].astype(int) / 20 + table.power / 60
    table["price"] = worth * np.exp(-0.08 * table.age) - table.distance / 400 + rng.normal(0, 0.1, count)
    return table


def batches(table, columns, size):
    middle, spread = table[NUMBERS].mean(), table[NUMBERS].std()
    order = np.random.permutation(len(table))
    for start in range(0, len(order), size):
        rows = table.iloc[order[start : start + size]]
        wide = pd.get_dummies(rows[CATEGORIES]).reindex(columns=columns, fill_value=0)
        numbers = (rows[NUMBERS] - middle) / spread
        features = np.concatenate([wide.to_numpy(np.float32), numbers.to_numpy(np.float32)], axis=1)
        yield torch.from_numpy(features), torch.from_numpy(rows.price.to_numpy(np.float32))


def main(epochs=6, size=200):
    torch.manual_seed(66)
    np.random.seed(66)
    table = cars(6000)
    columns = [f"{name}_{value}" for name in CATEGORIES for value in sorted(table[name].unique())]
    inputs = len(columns) + len(NUMBERS)
    model = nn.Sequential(
        nn.Linear(inputs, 384), nn.ReLU(), nn.Dropout(0.1), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(epochs):
        total = 0.0
        for features, prices in batches(table, columns, size):
            loss = F.huber_loss(model(features).squeeze(1), prices)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(prices)
        print(f"epoch {epoch}: loss {total / len(table):.4f}")


if __name__ == "__main__":
    main()
