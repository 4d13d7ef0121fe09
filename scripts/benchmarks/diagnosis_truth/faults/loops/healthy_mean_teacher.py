"""Heart rhythms with few labels: a student learns from a teacher, which is a moving average of its weights."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "Student and teacher see differently disturbed signals, so both forward passes are needed; the average is one fused update without a graph, and convolutions take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "duplicate-forward",
        "unused-gradients",
        "model-copies",
        "needless-copies",
        "kept-by-reference",
        "cut-gradients",
        "undone-update",
        "evaluation",
        "growth",
        "data-loading",
    ],
    "healthy": True,
}

RHYTHMS = 4


def beats(count, length=320):
    """Return signals of regular, fast, slow and irregular beats."""
    kinds = torch.randint(RHYTHMS, (count,))
    rate = torch.tensor([6.0, 10.0, 3.5, 6.0])[kinds] * (0.9 + 0.2 * torch.rand(count))
    time = torch.linspace(0, 1, length)
    drift = torch.cumsum(torch.randn(count, length), 1) / length**0.5
    phase = rate[:, None] * time + torch.rand(count, 1) + (kinds == 3).float()[:, None] * drift
    return torch.exp(-((phase % 1 - 0.5) ** 2) * 80)[:, None], kinds


def disturbed(signal):
    scale = 0.7 + 0.6 * torch.rand(len(signal), 1, 1)
    wave = torch.sin(torch.linspace(0, 6.28, signal.shape[-1]) + 6.28 * torch.rand(len(signal), 1, 1))
    return scale * signal + 0.2 * wave + 0.15 * torch.randn_like(signal)


def make_net(width=40):
    return nn.Sequential(
        nn.Conv1d(1, width, 9, padding=4), nn.GroupNorm(4, width), nn.ReLU(),
        nn.Conv1d(width, width, 9, padding=4), nn.GroupNorm(4, width), nn.ReLU(), nn.AvgPool1d(2),
        nn.Conv1d(width, 2 * width, 9, padding=4), nn.GroupNorm(4, 2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width, RHYTHMS),
    )  # fmt: skip


class MeanTeacher:
    def __init__(self, student, decay=0.99):
        self.student, self.decay = student, decay
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()
        self.steps = 0

    @torch.no_grad()
    def update(self):
        self.steps += 1
        decay = min(self.decay, 1 - 1 / (self.steps + 1))
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), 1 - decay)

    @torch.no_grad()
    def targets(self, signal):
        return self.teacher(signal).softmax(1)


def main(steps=100, labelled=8, unlabelled=24):
    torch.manual_seed(20)
    known, kinds = beats(64)
    unknown, truth = beats(1500)
    student = make_net()
    pair = MeanTeacher(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        some, others = torch.randint(len(known), (labelled,)), torch.randint(len(unknown), (unlabelled,))
        signal = torch.cat([known[some], unknown[others]])
        logits = student(disturbed(signal))
        wanted = pair.targets(disturbed(signal))
        weight = min(1.0, step / 50)
        loss = F.cross_entropy(logits[:labelled], kinds[some]) + weight * F.mse_loss(logits.softmax(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pair.update()
        if step % 25 == 0:
            right = (wanted[labelled:].argmax(1) == truth[others]).float().mean().item()
            print(f"step {step}: loss {loss.item():.4f}, teacher right {right:.2f}")


if __name__ == "__main__":
    main()
