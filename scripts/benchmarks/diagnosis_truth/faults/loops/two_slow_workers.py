"""Samples from slow storage, read by two workers."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "truth": "Two workers read each sample for 12 ms (slow storage); a batch of 8 takes 48 ms, the step 3 ms.",
    "cause": "data-loading",
    "also": [],
    "never": ["start-up", "evaluation", "host-python", "small-operators"],
    "healthy": False,
}


class Remote(Dataset):
    def __len__(self):
        return 8 * 40

    def __getitem__(self, index):
        time.sleep(0.012)
        g = torch.Generator().manual_seed(index)
        return torch.randn(128, generator=g), torch.tensor(index % 5)


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.loss = nn.CrossEntropyLoss()

    def train_step(self, batch):
        x, y = batch
        loss = self.loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, loader):
        for batch in loader:
            loss = self.train_step(batch)
        print(float(loss))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 5))
    Trainer(model, 1e-3).fit(DataLoader(Remote(), batch_size=8, num_workers=2))
