"""A character model with blocks that FSDP2 shards over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CASE = {
    "generation": 11,
    "truth": "The optimizer is made before fully_shard replaces the parameters, so it holds the old tensors, which never get gradients: no weight changes and the loss stays where it began.",
    "cause": "no-update",
    "also": ["exposed-communication"],
    "never": ["learning-rate-too-small", "straggler", "data-loading", "checkpoint-writing", "growth", "nan-loss"],
    "healthy": False,
    "ranks": 2,
    "place": ["optimizer = torch.optim.AdamW(", "model, optimizer = build(", "shard(model, mesh)", "optimizer.step()"],
    "remedy": "call fully_shard first and make the optimizer from the parameters that it leaves in the model",
    "without": [
        [
            "    model, optimizer = build(len(SYMBOLS))\n    shard(model, mesh)\n",
            "    model, _ = build(len(SYMBOLS))\n    shard(model, mesh)\n"
            "    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)\n",
        ]
    ],
}

SYMBOLS = "abcdefghijklmnopqrstuvwxyz .,"
CONTEXT = 48


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    def __init__(self, symbols, width=96, heads=4, depth=2):
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool), 1))

    def forward(self, ids):
        x = self.symbols(ids) + self.places.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def build(symbols):
    model = CharModel(symbols)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    return model, optimizer


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def make_text(length, generator):
    """A random walk over the symbols, with a few likely followers of each."""
    followers = torch.randint(0, len(SYMBOLS), (len(SYMBOLS), 3), generator=generator)
    choice = torch.randint(0, 3, (length,), generator=generator).tolist()
    table, text = followers.tolist(), [0]
    for c in choice:
        text.append(table[text[-1]][c])
    return torch.tensor(text)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model, optimizer = build(len(SYMBOLS))
    shard(model, mesh)
    text = make_text(60000, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(60):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (8,), generator=generator)
        ids = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()])
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
