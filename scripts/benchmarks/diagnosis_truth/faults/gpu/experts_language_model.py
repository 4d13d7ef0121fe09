"""A small language model with feed-forward layers of 32 experts, two of them for each token."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "A Python loop visits the 32 experts of each layer with some twenty tiny kernels each, and torch.where, "
    "which selects each one's tokens, waits for the GPU. Measured: 88%.",
    "cause": "launch-bound",
    "also": ["host-sync", "small-operators", "host-python", "low-occupancy"],
    "never": ["data-loading", "fp32-products", "logging", "exposed-communication"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["torch.where(chosen == index)"],
}

STEPS = 50
BATCH = 8
LENGTH = 512
WIDTH = 512
LAYERS = 3
EXPERTS = 32
VOCABULARY = 8192
device = "cuda" if torch.cuda.is_available() else "cpu"


class Experts(nn.Module):
    def __init__(self, width, hidden, experts, top=2):
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weight, chosen = self.router(x).float().softmax(-1).topk(self.top, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, (up, down) in enumerate(zip(self.up.unbind(), self.down.unbind())):
            rows, slot = torch.where(chosen == index)
            if rows.numel() == 0:
                continue
            y = F.gelu(x[rows] @ up) @ down
            out.index_add_(0, rows, (y * weight[rows, slot, None]).to(out.dtype))
        return out.view(shape)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.LayerNorm(width)
        self.experts = Experts(width, 2 * width, EXPERTS)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.experts(self.after(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.Sequential(*[Layer(WIDTH, 8) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.tokens(ids) + self.positions)))


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
text = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1), device=device)
for step, batch in enumerate(text):
    if step == STEPS - 20:
        start = clock()
    with torch.autocast(device, torch.bfloat16):
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
elapsed = clock() - start
print(f"loss {loss.item():.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
