"""Distillation of a small classifier from a teacher with weights out of a NumPy archive."""

import io

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "generation": 2,
    "truth": "The teacher's weights come from NumPy in float64, so its forward computes in double precision.",
    "cause": "fp64-products",
    "also": ["casts"],
    "never": ["start-up", "data-loading", "evaluation", "duplicate-forward", "growth"],
    "healthy": False,
    "place": ["teacher(images.double())", "self.layers(x)", "return self.layers"],
    "share": 39,
    "remedy": "compute the teacher in float32",
    "without": [["teacher(images.double()).float()", "teacher(images)"], ["MLP(2048).double()", "MLP(2048)"]],
}


class MLP(nn.Module):
    def __init__(self, width, classes=100, depth=3):
        super().__init__()
        sizes = [3 * 16 * 16] + [width] * (depth - 1)
        hidden = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.GELU())]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)


def archive_of(model):
    """Stand-in for the file that somebody sent."""
    buffer = io.BytesIO()
    np.savez(buffer, **{k: v.double().numpy() for k, v in model.state_dict().items()})
    buffer.seek(0)
    return np.load(buffer)


def load_teacher(archive):
    teacher = MLP(2048).double()
    teacher.load_state_dict({k: torch.from_numpy(archive[k]) for k in archive.files})
    return teacher.eval().requires_grad_(False)


def distillation_loss(student_logits, teacher_logits, labels, temperature=4.0, alpha=0.7):
    soft = F.kl_div(
        F.log_softmax(student_logits / temperature, dim=-1),
        F.softmax(teacher_logits / temperature, dim=-1),
        reduction="batchmean",
    )
    return alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(student_logits, labels)


torch.manual_seed(1)
teacher = load_teacher(archive_of(MLP(2048)))
student = MLP(512)
optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
images_all, labels_all = torch.randn(2000, 3, 16, 16), torch.randint(0, 100, (2000,))
for step in range(40):
    chosen = torch.randint(0, 2000, (64,))
    images, labels = images_all[chosen], labels_all[chosen]
    with torch.no_grad():
        teacher_logits = teacher(images.double()).float()
    loss = distillation_loss(student(images), teacher_logits, labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.4f}")
