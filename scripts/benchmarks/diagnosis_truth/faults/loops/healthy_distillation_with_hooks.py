"""Distillation of features that hooks collect, and an average of the student's weights."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 3,
    "truth": "The teacher runs without gradients once per batch, hooks only keep references, the average is fused; convolutions take the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "unused-gradients",
        "evaluation",
        "growth",
        "host-python",
        "model-copies",
        "small-operators",
    ],
    "healthy": True,
}


class Features:
    """Outputs of some modules of a network, of its last forward."""

    def __init__(self, network, names):
        self.seen = {}
        for name in names:
            network.get_submodule(name).register_forward_hook(self.keep(name))

    def keep(self, name):
        def hook(module, inputs, output):
            self.seen[name] = output

        return hook

    def pop(self):
        seen, self.seen = self.seen, {}
        return seen


def convnet(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 20),
    )


@torch.no_grad()
def update_average(average, model, decay=0.99):
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def main():
    torch.manual_seed(0)
    teacher, student = convnet(32).eval().requires_grad_(False), convnet(24)
    average = copy.deepcopy(student).requires_grad_(False)
    of_teacher, of_student = Features(teacher, ["4"]), Features(student, ["4"])
    optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for step in range(45):
        x = torch.randn(32, 3, 32, 32)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 4, 1)
        logits = student(x)
        loss = F.kl_div(F.log_softmax(logits / 4, 1), soft, reduction="batchmean") * 16
        hints, own = of_teacher.pop(), of_student.pop()
        loss = loss + sum(F.mse_loss(own[name], hints[name]) for name in own)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        update_average(average, student)
        if step % 15 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
