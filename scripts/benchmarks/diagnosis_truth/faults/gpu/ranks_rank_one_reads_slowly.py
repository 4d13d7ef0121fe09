"""Two ranks; one reads its data from a slower disk."""

import os
import time

import torch
import torch.distributed as dist
from _gpt import GPT, batches
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "truth": "Rank 1 waits 30 ms for its data in every step; rank 0 waits for it in the reduction of gradients.",
    "cause": "straggler",
    "also": ["data-loading", "host-python"],
    "never": ["exposed-communication", "small-buckets", "launch-bound"],
    "healthy": False,
    "ranks": 2,
    "requires": ["two GPUs"],
}

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(GPT(d_model=768, layers=8, heads=12).cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def read(steps):
    for batch in batches(steps, 8, 512):
        if rank == 1:
            time.sleep(0.03)
        yield batch


for ids, targets in read(50):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
