"""A look at what the model writes, every tenth step."""

import torch
from _gpt import GPT, batches

CASE = {
    "truth": "Every tenth step 60 tokens are generated one by one; that is most of the loop's time.",
    "cause": "evaluation",
    "also": ["launch-bound", "host-python"],
    "never": ["data-loading", "start-up", "growth"],
    "healthy": False,
    "requires": ["cuda"],
}


@torch.no_grad()
def generate(model, ids, tokens):
    model.eval()
    for _ in range(tokens):
        logits = model(ids)[:, -1]
        ids = torch.cat([ids, logits.softmax(-1).multinomial(1)], 1)
    model.train()
    return ids


torch.manual_seed(0)
model = GPT(d_model=768, layers=8, heads=12).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step, (ids, targets) in enumerate(batches(60, 8, 512)):
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        text = generate(model, ids[:1, :16], 60).tolist()
        print(step, len(text[0]), loss.item())
