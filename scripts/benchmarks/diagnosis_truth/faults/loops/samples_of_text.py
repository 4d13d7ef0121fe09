"""A character model that writes a sample of text every eight steps, token by token."""

import torch
from _transformer import LM, loss_fn

CASE = {
    "truth": "Every eighth step generates 40 characters without a cache, several times the time of the eight steps.",
    "cause": "evaluation",
    "also": ["periodic-pause", "host-python", "logging"],
    "never": ["start-up", "data-loading"],
    "healthy": False,
}


@torch.no_grad()
def generate(model, start, length):
    model.eval()
    ids = start
    for _ in range(length):
        logits = model(ids[:, -64:])[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    model.train()
    return ids


def main():
    torch.manual_seed(5)
    model = LM(V=96, d=96, L=3)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
    text = torch.randint(0, 96, (20000,))
    for it in range(40):
        at = torch.randint(0, 19000, (4,))
        batch = torch.stack([text[i : i + 49] for i in at])
        loss = loss_fn(model(batch[:, :-1]), batch[:, 1:])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        if it % 8 == 7:
            sample = generate(model, batch[:1, :8], 40)
            print("".join(chr(32 + c % 95) for c in sample[0].tolist()))


main()
