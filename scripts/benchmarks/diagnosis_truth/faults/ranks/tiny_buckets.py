"""DDP with buckets of one tensor each."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "truth": "bucket_cap_mb=0.001 gives each tensor its own bucket: 160 all-reduces per step, each at its latency.",
    "cause": "small-buckets",
    "also": ["exposed-communication"],
    "never": ["start-up", "data-loading", "straggler", "evaluation"],
    "healthy": False,
    "ranks": 2,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bucket", type=float, default=0.001)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(80)])
    net = DDP(net, bucket_cap_mb=args.bucket)
    opt = torch.optim.AdamW(net.parameters(), foreach=True)
    for _ in range(32):
        loss = net(torch.randn(8, 48)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
