"""Two workers that are fast enough: batches wait in the queue."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "truth": "Two workers prepare the batches in time; the network's products take the step.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "evaluation"],
    "healthy": True,
}


class Vectors(Dataset):
    def __len__(self):
        return 32 * 40

    def __getitem__(self, i):
        return torch.full((256,), float(i % 13)).sin(), i % 13


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 1536), nn.GELU(), nn.Linear(1536, 1536), nn.GELU(), nn.Linear(1536, 13))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(Vectors(), 32, num_workers=2, persistent_workers=True, prefetch_factor=4):
        loss = nn.functional.cross_entropy(model(x.repeat(6, 1)), y.repeat(6))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
