"""Small vision transformer on synthetic flags, with the distributed tutorial's helpers, launched as a single process."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 8,
    "truth": "The script runs as one process but broadcasts every parameter and all-reduces every gradient one by one in each step: the collectives have nobody to talk to.",
    "cause": "exposed-communication",
    "also": ["small-buckets"],
    "never": ["data-loading", "evaluation", "growth", "logging", "checkpoint-writing", "padding"],
    "healthy": False,
    "place": ["dist.all_reduce(", "dist.broadcast(", "average_gradients(", "sync_parameters(", "param.grad.div_("],
    "share": 37,
    "remedy": "skip the synchronisation when the world has one process (or flatten all gradients into one collective)",
    "without": [
        [
            "    size = float(dist.get_world_size())\n",
            "    size = float(dist.get_world_size())\n    if size == 1:\n        return\n",
        ],
        [
            "def sync_parameters(model):\n",
            "def sync_parameters(model):\n    if dist.get_world_size() == 1:\n        return\n",
        ],
    ],
}


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad.div_(size)


def sync_parameters(model):
    """Keep replicas identical, they drift otherwise."""
    for param in model.parameters():
        dist.broadcast(param.data, src=0)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, classes=12, dim=48, depth=10, heads=3, side=32, patch=8):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, dim))
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


def flags(count, classes=12, side=32):
    """Stripes: their number and direction are the class."""
    y = torch.randint(classes, (count,))
    axis = torch.arange(side) / side
    wave = torch.sign(torch.sin(6.2832 * (1 + y % 6)[:, None] * axis))
    picture = torch.where((y < 6)[:, None, None], wave[:, :, None], wave[:, None, :])
    return picture[:, None] * torch.randn(count, 3, 1, 1) + 0.3 * torch.randn(count, 3, side, side), y


def main(epochs=3, batch=8):
    rendezvous = os.path.join(tempfile.mkdtemp(), "store")
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.manual_seed(1234)
    x, y = flags(360)
    model = ViT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        total = 0.0
        order = torch.randperm(len(x))[rank::world]
        for pick in order.split(batch):
            sync_parameters(model)
            loss = F.cross_entropy(model(x[pick]), y[pick])
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.item()
        print(f"rank {rank}, epoch {epoch}: loss {total / (len(order) / batch):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
