"""Rank 0 writes a checkpoint after every fifth step, and the other waits at a barrier."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "truth": "After every fifth step rank 0 writes 80 MB with fsync while rank 1 waits at a barrier; this takes most of the time.",
    "cause": "checkpoint-writing",
    "also": ["periodic-pause", "straggler"],
    "never": ["start-up", "data-loading", "small-buckets", "no-sync-missing"],
    "healthy": False,
    "ranks": 2,
}


def save(model, folder):
    with open(os.path.join(folder, "ckpt.pt"), "wb") as file:
        torch.save(model.module.state_dict(), file)
        os.fsync(file.fileno())


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(80000, 256).requires_grad_(False)
        self.out = nn.Linear(256, 12)

    def forward(self, ids):
        return self.out(self.words(ids))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.module.out.parameters())
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, 34):
            ids = torch.randint(0, 80000, (16, 40))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 12)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                if dist.get_rank() == 0:
                    save(model, folder)
                dist.barrier()
    dist.destroy_process_group()


main()
