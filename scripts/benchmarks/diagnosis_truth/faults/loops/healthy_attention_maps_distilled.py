"""Distils a teacher with eight heads into a narrow student, which imitates its attention maps too."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Attention weights of student and teacher are returned on purpose, as the loss compares them; the teacher is frozen, in evaluation mode and without gradients. Attention and products take the time.",
    "cause": None,
    "also": [],
    "never": ["unfused-attention", "duplicate-forward", "unused-gradients", "wrong-mode", "no-update", "data-loading"],
    "healthy": True,
}


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        h = self.norm(x)
        mixed, weights = self.attention(h, h, h)
        x = x + mixed
        return x + self.feed(x), weights


class Tagger(nn.Module):
    def __init__(self, words, tags, length, width, heads, depth):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.tags = nn.Linear(width, tags)

    def forward(self, tokens):
        x, maps = self.words(tokens) + self.place, []
        for layer in self.layers:
            x, weights = layer(x)
            maps.append(weights)
        return self.tags(x), maps


def distil(teacher, student, steps, batch, words, length, temperature=2.0):
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, fused=True)
    teacher.eval().requires_grad_(False)
    for step in range(steps):
        tokens = torch.randint(words, (batch, length))
        with torch.no_grad():
            goal, goal_maps = teacher(tokens)
        logits, maps = student(tokens)
        soft = F.kl_div(
            F.log_softmax(logits / temperature, -1), F.softmax(goal / temperature, -1), reduction="batchmean"
        )
        loss = soft / length + 100 * sum(F.mse_loss(a, b) for a, b in zip(maps, goal_maps[1::2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"{step:3d} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(10)
    words, length = 500, 64
    teacher = Tagger(words, 20, length, 192, 8, 4)
    student = Tagger(words, 20, length, 96, 4, 2)
    distil(teacher, student, steps=60, batch=16, words=words, length=length)
