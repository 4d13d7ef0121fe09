"""A language model with schedules, clipping and an average of its weights."""

import torch
from _transformer import LM, loss_fn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CASE = {
    "truth": "A language model with warm-up, cosine schedule, clipping and a fused average of the weights, each a small share.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "evaluation"],
    "healthy": True,
}


def main(steps=40, warmup=10):
    torch.manual_seed(1)
    model = LM(d=160, L=2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rise = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=warmup)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps - warmup)
    schedule = torch.optim.lr_scheduler.SequentialLR(opt, [rise, fall], [warmup])
    for step in range(steps):
        ids = torch.randint(512, (8, 97))
        loss = loss_fn(model(ids[:, :-1]), ids[:, 1:])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        schedule.step()
        average.update_parameters(model)
        if step % 10 == 9:
            print(f"step {step:3d} loss {loss.item():.3f} lr {schedule.get_last_lr()[0]:.2e}")


main()
