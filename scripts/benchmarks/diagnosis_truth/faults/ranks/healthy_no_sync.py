"""DDP with accumulation that reduces once per step, as it should."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "truth": "Four micro-batches of which three run under no_sync(); the computation takes the step on two equal ranks.",
    "cause": None,
    "also": ["straggler"],
    "never": ["no-sync-missing", "small-buckets", "find-unused-parameters", "data-loading"],
    "healthy": True,
    "ranks": 2,
}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(28):
        for micro in range(4):
            with nullcontext() if micro == 3 else model.no_sync():
                x = torch.randn(512, 128)
                (nn.functional.mse_loss(model(x), x) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
