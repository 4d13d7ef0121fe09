"""Two ranks accumulate eight micro-batches."""

import os

import torch
import torch.distributed as dist
from _gpt import GPT, batches
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "truth": "Short micro-batches wait for launches most of the time; needless reductions of gradients take less than 10%.",
    "cause": "launch-bound",
    "also": ["exposed-communication", "no-sync-missing"],
    "never": ["straggler", "data-loading", "host-python"],
    "healthy": False,
    "ranks": 2,
    "requires": ["two GPUs"],
}

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(GPT(d_model=1024, layers=8, heads=16).cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
data = batches(8 * 40, 1, 256)
for _step in range(40):
    optimizer.zero_grad()
    for _ in range(8):
        ids, targets = next(data)
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = model(ids, targets)
        (loss / 8).backward()
    optimizer.step()
dist.destroy_process_group()
