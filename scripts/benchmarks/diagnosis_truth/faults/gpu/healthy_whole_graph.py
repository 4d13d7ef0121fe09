"""A small step, captured once and replayed."""

import torch
from _gpt import GPT

CASE = {
    "truth": "The step of a small model is one CUDA graph; its kernels follow each other; nothing that a user would change.",
    "cause": None,
    "also": ["elementwise-chain", "low-occupancy", "graph-recorded-whole"],
    "never": ["launch-bound", "host-sync", "data-loading", "host-python"],
    "healthy": True,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = GPT(vocab=8192, d_model=512, layers=6, heads=8, context=256).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=True)
ids, targets = (torch.randint(0, 8192, (16, 256), device="cuda") for _ in range(2))
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(ids, targets)[1].backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    _, loss = model(ids, targets)
    loss.backward()
    optimizer.step()
for _step in range(200):
    ids.copy_(torch.randint(0, 8192, (16, 256), device="cuda"))
    graph.replay()
print(loss.item())
