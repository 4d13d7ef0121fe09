"""Readmission to hospital, from all visits of a patient in one long table."""

import logging

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 13,
    "truth": "__getitem__ finds a patient's visits by comparing the whole column of patients, 40,000 rows, with one number, for each patient in each epoch; grouping once would do.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["evaluation", "growth", "start-up", "logging", "padding"],
    "healthy": False,
    "place": ['self.visits["patient"] == patient', "in enumerate(loader)"],
    "share": 69,
    "remedy": "group the table by patient once, in __init__",
    "without": [
        [
            '        rows = self.visits[self.visits["patient"] == patient]\n        series = rows[COLUMNS].to_numpy(np.float32)[-16:]\n',
            "        series = self.groups[patient][-16:]\n",
        ],
        [
            "        self.visits, self.labels = visits, labels\n",
            '        self.visits, self.labels = visits, labels\n        self.groups = {p: g[COLUMNS].to_numpy(np.float32) for p, g in visits.groupby("patient")}\n',
        ],
    ],
    "requires": ["pandas"],
}

COLUMNS = ["pressure", "pulse", "weight", "sugar", "stay"]
log = logging.getLogger("readmission")


def hospital(patients=2000, mean=20, seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(mean, patients) + 1
    ill = rng.random(patients) < 0.4
    patient = np.repeat(np.arange(patients), counts)
    values = rng.standard_normal((len(patient), len(COLUMNS))) + 0.4 * ill[patient, None]
    return pd.DataFrame(values, columns=COLUMNS).assign(patient=patient), ill.astype(np.int64)


class PatientDataset(Dataset):
    def __init__(self, visits, labels):
        self.visits, self.labels = visits, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, patient):
        rows = self.visits[self.visits["patient"] == patient]
        series = rows[COLUMNS].to_numpy(np.float32)[-16:]
        padded = np.zeros((16, len(COLUMNS)), np.float32)
        padded[16 - len(series) :] = series
        return torch.from_numpy(padded), int(self.labels[patient])


class VisitLSTM(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.lstm = nn.LSTM(len(COLUMNS), hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[1][0][-1])


def main():
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.manual_seed(0)
    visits, labels = hospital()
    loader = DataLoader(PatientDataset(visits, labels), batch_size=50, shuffle=True, drop_last=True)
    model = VisitLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(3):
        total = 0.0
        for step, (series, label) in enumerate(loader):
            loss = loss_fn(model(series), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            if step % 20 == 0:
                log.info("epoch %d step %d loss %.3f", epoch, step, loss.item())
        log.info("epoch %d: mean loss %.3f", epoch, total / len(loader))


if __name__ == "__main__":
    main()
