"""Flow matching: a velocity field between noise and embeddings, with the time joined to each layer's input."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "The time as one further column makes the inputs of all layers 2049 wide, so that rows of the bf16 "
    "operands are not aligned and the products run far below the chip's rate. Measured: 72%.",
    "cause": "slow-products",
    "also": ["elementwise-chain", "casts"],
    "never": ["data-loading", "host-sync", "launch-bound", "fp32-products", "exposed-copies"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["nn.Linear(inputs + 1, outputs)"],
}

STEPS = 60
BATCH = 16384
WIDTH = 2048
LAYERS = 6
device = "cuda" if torch.cuda.is_available() else "cpu"


class TimedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs + 1, outputs)

    def forward(self, x, moment):
        return self.linear(torch.cat([x, moment], dim=-1))


class Field(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(TimedLinear(width, width) for _ in range(layers))

    def forward(self, x, moment):
        x, moment = x.bfloat16(), moment.bfloat16()
        for layer in self.layers[:-1]:
            x = F.silu(layer(x, moment))
        return self.layers[-1](x, moment)


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
field = Field(WIDTH, LAYERS).to(device)
optimizer = torch.optim.AdamW(field.parameters(), lr=1e-4, fused=True)
bank = torch.randn(4, BATCH, WIDTH, device=device)
total = torch.zeros((), device=device)

for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    data = bank[step % 4]
    noise = torch.randn_like(data)
    moment = torch.rand(BATCH, 1, device=device)
    with torch.autocast(device, torch.bfloat16):
        velocity = field(torch.lerp(noise, data, moment), moment)
    loss = F.mse_loss(velocity.float(), data - noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.detach()
elapsed = clock() - start
print(f"mean loss {total.item() / STEPS:.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
