"""Melodies as a language: a small GPT predicts the next note."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "The activation of the blocks is written out as a formula with pow and tanh, so that each block reads and writes its widest tensor eight times: 22% of the loop's time.",
    "cause": "elementwise-chain",
    "also": ["small-operators"],
    "never": ["data-loading", "growth", "evaluation", "logging", "unfused-attention", "checkpoint-writing", "start-up"],
    "healthy": False,
    "place": [
        "return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))",
        "return self.narrow(self.activation(self.widen(x)))",
        "self.activation = TanhGelu()",
    ],
    "share": 22,
    "remedy": "use nn.GELU(approximate='tanh'), which is one operator",
    "without": [["self.activation = TanhGelu()", "self.activation = nn.GELU(approximate='tanh')"]],
}

NOTES, LENGTH = 64, 96


def melodies(count):
    """Return sequences of notes that wander up and down in small steps and repeat after half their length."""
    moves = torch.randint(-4, 5, (count, LENGTH // 2 + 1))
    notes = (torch.randint(NOTES, (count, 1)) + moves.cumsum(1)) % NOTES
    return torch.cat([notes, notes[:, : LENGTH // 2]], 1)[:, : LENGTH + 1]


class TanhGelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.joined(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = TanhGelu()

    def forward(self, x):
        return self.narrow(self.activation(self.widen(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = Attention(width, heads), FeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Composer(nn.Module):
    def __init__(self, width=64, heads=4, depth=3):
        super().__init__()
        self.notes, self.places = nn.Embedding(NOTES, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NOTES)

    def forward(self, notes):
        x = self.notes(notes) + self.places.weight[: notes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main(steps=70, batch=16):
    torch.manual_seed(61)
    songs = melodies(800)
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        song = songs[torch.randint(len(songs), (batch,))]
        logits = model(song[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), song[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
