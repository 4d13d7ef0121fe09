"""Two ranks, compiled, with overlapped reductions."""

import os

import torch
import torch.distributed as dist
from _gpt import GPT, batches
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "truth": "DDP of two ranks, whose reductions are hidden by a backward pass of large products; nothing to mend.",
    "cause": None,
    "also": ["elementwise-chain"],
    "never": ["straggler", "exposed-communication", "small-buckets", "launch-bound"],
    "healthy": True,
    "ranks": 2,
    "requires": ["two GPUs"],
}

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = torch.compile(GPT(d_model=1536, layers=8, heads=12).cuda())
model = DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for ids, targets in batches(40, 16, 1024):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
