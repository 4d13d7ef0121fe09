"""Time each block, to know where the time goes."""

import time

import torch
from _gpt import GPT, Block, batches

CASE = {
    "truth": "Kernels of 24 small blocks wait for their launches; 48 waits of the host a step are 1% by themselves.",
    "cause": "launch-bound",
    "also": ["host-sync", "host-python", "own-profiler"],
    "never": ["data-loading", "fp32-products", "evaluation"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["torch.cuda.synchronize()"],
}
times = {}


class Timed(Block):
    def forward(self, x):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = super().forward(x)
        torch.cuda.synchronize()
        times.setdefault(id(self), []).append(time.perf_counter() - start)
        return y


torch.manual_seed(0)
model = GPT(d_model=512, layers=24, heads=8)
model.blocks = torch.nn.ModuleList([Timed(512, 8) for _ in range(24)])
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _step, (ids, targets) in enumerate(batches(50, 8, 512)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
