"""The script profiles itself with torch.profiler during steps 2 to 23 and prints what it found."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

CASE = {
    "truth": "The script's own torch.profiler records steps 4 to 23 and is the largest cost of these steps.",
    "cause": "own-profiler",
    "also": ["small-operators"],
    "never": ["data-loading", "evaluation", "growth"],
    "healthy": False,
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters())
found = []
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=2, warmup=2, active=20, repeat=1),
    on_trace_ready=lambda p: found.append(len(p.key_averages())),
) as prof:
    for _ in range(40):
        loss = model(torch.randn(4, 64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()
print([n > 5 for n in found], sum(e.count for e in prof.key_averages() if e.key == "aten::addmm"))
