"""A byte-level language model; the loss of each step goes into a running mean and a list."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "loss.item() waits for the GPU once a step, after the update, but the step is a few hundred long kernels, "
    "so that the GPU idles for the launch of the first ones only; nothing to mend.",
    "cause": None,
    "also": [],
    "never": ["host-sync", "logging", "launch-bound", "fp32-products", "data-loading", "unfused-attention"],
    "healthy": True,
    "requires": ["cuda"],
}

STEPS = 50
BATCH = 12
LENGTH = 1024
WIDTH = 3072
LAYERS = 3
device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.after = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.after(x)), inplace=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.Sequential(*[Layer(WIDTH, WIDTH // 128) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.embedding(ids) + self.positions)))


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
with torch.device(device):
    model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
text = torch.randint(256, (STEPS, BATCH, LENGTH + 1), device=device)
history, average = [], 0.0
for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    inputs, targets = text[step, :, :-1], text[step, :, 1:]
    with torch.autocast(device, torch.bfloat16):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    average = history[-1] if step == 0 else 0.9 * average + 0.1 * history[-1]
elapsed = clock() - start
print(f"average loss {average:.4f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
