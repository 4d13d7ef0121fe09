"""Training script that reads its rank from Slurm, as scripts do that `srun` starts."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.measure.recorder.loops import batches, loss_of, net

if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i, batch in enumerate(batches(20)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if i == 19:
            print(i)
    dist.destroy_process_group()
