"""One trunk for street pictures with three heads, of which every step trains one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 11,
    "truth": "find_unused_parameters is needed here: each step trains one of three heads, the same on both ranks, and the others get no gradient; the search is small beside the convolutions, and model.module serves the validation only.",
    "cause": None,
    "also": ["straggler"],
    "never": [
        "find-unused-parameters",
        "unused-gradients",
        "exposed-communication",
        "small-buckets",
        "evaluation",
        "data-loading",
        "no-update",
    ],
    "healthy": True,
    "ranks": 2,
}


class StreetNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.heads = nn.ModuleDict(
            {
                "sign": nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 10)),
                "distance": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 1)),
                "road": nn.Sequential(nn.Conv2d(2 * width, 1, 1), nn.Upsample(scale_factor=4)),
            }
        )

    def forward(self, pictures, task):
        return self.heads[task](self.trunk(pictures))


def make_batch(task, size, generator):
    pictures = torch.rand(size, 3, 40, 40, generator=generator)
    if task == "sign":
        target = torch.randint(0, 10, (size,), generator=generator)
        pictures[:, 0, 5:35, 5:35] = target[:, None, None] / 10
    elif task == "distance":
        target = pictures[:, 2].mean((1, 2)).unsqueeze(1) * 4 - 2
    else:
        target = (pictures[:, 1:2] > 0.6).float()
    return pictures, target


def loss_of(task, output, target):
    if task == "sign":
        return nn.functional.cross_entropy(output, target)
    if task == "distance":
        return nn.functional.mse_loss(output, target)
    return nn.functional.binary_cross_entropy_with_logits(output, target)


@torch.no_grad()
def validate(model, held_out):
    model.eval()
    losses = [loss_of(task, model(pictures, task), target) for task, (pictures, target) in held_out.items()]
    model.train()
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(StreetNet(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tasks = list(model.module.heads)
    turns = torch.Generator().manual_seed(8)
    data = torch.Generator().manual_seed(80 + rank)
    held_out = {task: make_batch(task, 8, data) for task in tasks}
    for step in range(90):
        task = tasks[torch.randint(0, len(tasks), (), generator=turns)]
        pictures, target = make_batch(task, 6, data)
        loss = loss_of(task, model(pictures, task), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 45 == 0:
            score = validate(model.module, held_out)
            if rank == 0:
                print(f"after {step + 1} steps: validation loss {score:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
