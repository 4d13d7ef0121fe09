"""Local SGD: two ranks train alone and average their weights every eighth step."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

CASE = {
    "generation": 3,
    "truth": "Every eighth step averages all weights by one collective, a few percent of the loop; products take the rest.",
    "cause": None,
    "also": [],
    "never": [
        "straggler",
        "exposed-communication",
        "small-buckets",
        "periodic-pause",
        "no-sync-missing",
        "host-python",
    ],
    "healthy": True,
    "ranks": 2,
}


def average_weights(model):
    with torch.no_grad():
        flat = parameters_to_vector(model.parameters())
        dist.all_reduce(flat)
        vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randn(256, 128, generator=generator)
        yield x, x.cumsum(1)[:, 7::8]


def main(rank, steps=48, every=8):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(batches(rank, steps), 1):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            average_weights(model)
    print(f"rank {rank}: loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(int(os.environ["RANK"]))
    dist.destroy_process_group()
