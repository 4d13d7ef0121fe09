"""Masked amino acids: peptides of different length are packed into rows, and a wide encoder fills the gaps."""

import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "Python packs and masks each batch in the main process for some milliseconds, but the GPU still works on "
    "the step before, as nothing waits for it: it is never without work.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "host-sync", "launch-bound", "fp32-products", "exposed-copies", "padding"],
    "healthy": True,
    "requires": ["cuda"],
}

STEPS = 50
ROWS = 24
LENGTH = 512
LETTERS = 24
MASK = 23
WIDTH = 3072
LAYERS = 3
device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.after(x))


class Packer:
    """Fills rows with changed chains, longest first, each into the first row with room; the last ones are cut."""

    def __init__(self, chains, seed):
        self.chains = chains
        self.generator = np.random.default_rng(seed)

    def change(self, chain, rate=0.03):
        """Some letters replaced at random, read in either direction."""
        replaced = self.generator.random(len(chain)) < rate
        chain = np.where(replaced, self.generator.integers(0, 20, len(chain)), chain)
        return chain[::-1] if self.generator.random() < 0.5 else chain

    def __call__(self, inputs, targets):
        picked = self.generator.integers(len(self.chains), size=23 * ROWS)
        room, rows = [LENGTH] * ROWS, [[] for _ in range(ROWS)]
        for chain in sorted((self.change(self.chains[index]) for index in picked), key=len, reverse=True):
            for row in range(ROWS):
                if room[row] >= len(chain):
                    rows[row].append(chain)
                    room[row] -= len(chain)
                    break
        for row in range(ROWS):
            while room[row] > 0:
                chain = self.change(self.chains[self.generator.integers(len(self.chains))])[: room[row]]
                rows[row].append(chain)
                room[row] -= len(chain)
        whole = np.stack([np.concatenate(row) for row in rows])
        hidden = self.generator.random(whole.shape) < 0.15
        targets.copy_(torch.from_numpy(np.where(hidden, whole, -100)))
        inputs.copy_(torch.from_numpy(np.where(hidden, MASK, whole)))


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
generator = np.random.default_rng(0)
chains = [generator.integers(0, 20, size) for size in generator.integers(8, 36, 40000)]
pack = Packer(chains, seed=1)
pinned = torch.empty(STEPS, 2, ROWS, LENGTH, dtype=torch.long, pin_memory=device == "cuda")
with torch.device(device):
    model = nn.Sequential(
        nn.Embedding(LETTERS, WIDTH),
        *[Layer(WIDTH, 24) for _ in range(LAYERS)],
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, LETTERS),
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    pack(pinned[step, 0], pinned[step, 1])
    inputs, targets = pinned[step].to(device, non_blocking=True)
    with torch.autocast(device, torch.bfloat16):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
elapsed = clock() - start
print(f"loss {loss.item():.4f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
