"""Two ranks train a query tower against a frozen table of items, which is a buffer of the model."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "generation": 5,
    "truth": "The frozen table of 15 MB is a buffer, and DistributedDataParallel sends all buffers from rank 0 before each forward.",
    "cause": "exposed-communication",
    "also": ["small-buckets"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "find-unused-parameters"],
    "healthy": False,
    "ranks": 2,
    "place": [
        "DistributedDataParallel(",
        "self.register_buffer(",
        "scores = model(",
    ],
    "share": 58,
    "remedy": "send no buffers, as the table never changes: forward_sync_buffers=False, broadcast_buffers=False before torch 2.13",
    "without": [
        [
            "DistributedDataParallel(Retriever(opts))",
            "DistributedDataParallel(Retriever(opts), broadcast_buffers=False)",
        ]
    ],
}


class Retriever(nn.Module):
    """Scores of some items for each history of clicks; the items' vectors come from another model and stay as they are."""

    def __init__(self, opts):
        super().__init__()
        generator = torch.Generator().manual_seed(42)
        table = F.normalize(torch.randn(opts.items, opts.dim, generator=generator), dim=-1)
        self.register_buffer("items", table)
        self.mix = nn.GRU(opts.dim, opts.hidden, batch_first=True)
        self.query = nn.Sequential(nn.LayerNorm(opts.hidden), nn.Linear(opts.hidden, opts.dim))

    def forward(self, history, candidates):
        _, last = self.mix(F.embedding(history, self.items))
        query = F.normalize(self.query(last[0]), dim=-1)
        return torch.einsum("bd,bkd->bk", query, F.embedding(candidates, self.items)) / 0.07


def clicks(opts, generator):
    """Histories that drift through the catalogue, with the next item first among the candidates."""
    start = torch.randint(opts.items, (opts.batch, 1), generator=generator)
    stride = torch.randint(1, 9, (opts.batch, 1), generator=generator)
    walk = (start + stride * torch.arange(opts.length + 1)) % opts.items
    others = torch.randint(opts.items, (opts.batch, opts.negatives), generator=generator)
    return walk[:, :-1], torch.cat([walk[:, -1:], others], 1)


def train(opts):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Retriever(opts))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=opts.lr)
    generator = torch.Generator().manual_seed(100 + rank)
    wanted = torch.zeros(opts.batch, dtype=torch.long)
    for step in range(1, opts.steps + 1):
        history, candidates = clicks(opts, generator)
        scores = model(history, candidates)
        loss = F.cross_entropy(scores, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 30 == 0:
            print(f"{step:4d} | loss {loss.item():.4f} | hit@1 {(scores.argmax(1) == 0).float().mean().item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=60_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--negatives", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=0.02)
    dist.init_process_group("gloo")
    try:
        train(parser.parse_args())
    finally:
        dist.destroy_process_group()
