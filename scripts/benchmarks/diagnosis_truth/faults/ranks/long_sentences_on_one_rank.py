"""DDP on sentences sorted by length, each rank with its own half of the file."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "generation": 3,
    "truth": "The sentences are sorted by length, and rank 1 has the long half: each batch takes it three times as long.",
    "cause": "straggler",
    "also": [],
    "never": [
        "start-up",
        "data-loading",
        "evaluation",
        "growth",
        "no-sync-missing",
        "find-unused-parameters",
        "host-python",
    ],
    "healthy": False,
    "ranks": 2,
    "place": ["lengths = my_lengths(rank)", "return lengths[rank"],
    "share": None,
    "remedy": "deal batches of equal length to the ranks",
    "without": [["lengths[rank * half : (rank + 1) * half]", "lengths[rank::2]"]],
}


class Encoder(nn.Module):
    def __init__(self, vocabulary=1000, d=96):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, 2)

    def forward(self, ids):
        return self.out(self.layers(self.embed(ids)).mean(1))


def my_lengths(rank, batches=60):
    lengths = torch.linspace(16, 120, batches).int().tolist()
    half = batches // 2
    return lengths[rank * half : (rank + 1) * half]


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(rank)
    for epoch in range(2):
        lengths = my_lengths(rank)
        for at in torch.randperm(len(lengths), generator=generator).tolist():
            ids = torch.randint(0, 1000, (16, lengths[at]), generator=generator)
            label = (ids.float().mean(1) > 500).long()
            loss = nn.functional.cross_entropy(model(ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print("epoch", epoch, "loss", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
