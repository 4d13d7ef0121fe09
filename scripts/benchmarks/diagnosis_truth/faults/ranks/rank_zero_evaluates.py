"""DDP in which rank 0 alone evaluates while the other waits at the next step."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 2,
    "truth": "After every sixth step rank 0 alone evaluates on 40 batches, and rank 1 waits for it: most of the time.",
    "cause": "evaluation",
    "also": ["periodic-pause", "straggler"],
    "never": ["start-up", "data-loading", "small-buckets", "no-sync-missing", "find-unused-parameters", "growth"],
    "healthy": False,
    "ranks": 2,
    "place": ["evaluate(model.module, held_out)", "network(x)", "hits += ", "dist.barrier()"],
    "share": 65,
    "remedy": "evaluate less often, and divide the batches among the ranks",
    "without": [["if (step + 1) % 6 == 0:", "if step < 0:"]],
}


@torch.no_grad()
def evaluate(network, held_out):
    network.eval()
    hits = 0
    for x, y in held_out:
        hits += (network(x).argmax(-1) == y).sum().item()
    network.train()
    return hits / sum(len(y) for _, y in held_out)


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 20, 20, generator=g)
    return x, (x.mean((1, 2, 3)) > 0).long()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(
        nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24 * 64, 2),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = [make(32, 1000 + i) for i in range(40)]
    for step in range(36):
        x, y = make(24, step * world + rank)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 6 == 0:
            if rank == 0:
                accuracy = evaluate(model.module, held_out)
                print(
                    f"step {step + 1}: accuracy {accuracy:.3f} on {os.environ['HOSTNAME'] if 'HOSTNAME' in os.environ else 'host'}"
                )
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
