"""Mixed precision with a scale that always overflows."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "The GradScaler's scale is far too large: every optimizer step is skipped.",
    "cause": "skipped-steps",
    "also": ["no-update", "nan-loss"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}

torch.manual_seed(0)
model = LM()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**6)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 1.0)
skipped = 0
for _ in range(45):
    x = torch.randint(512, (8, 65))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn(model(x[:, :-1]), x[:, 1:])
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += scaler.get_scale() < before
print("skipped", skipped, "of 45")
