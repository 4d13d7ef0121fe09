"""Fine-tuning of a pretrained text classifier: first its head alone, then its upper blocks too."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "The optimizer was made while the blocks were frozen, so the blocks that thaw after a few steps get gradients that no optimizer reads, and nothing clears them: 50% of the loop's time, and the blocks never learn.",
    "cause": "unused-gradients",
    "also": ["gradients-not-cleared", "gradient-memory"],
    "never": ["data-loading", "host-python", "growth", "logging", "evaluation", "checkpoint-writing", "padding"],
    "healthy": False,
    "place": [
        "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, fused=True)",
        "block.requires_grad_(True)",
        "thaw(model, 2)",
        "loss.backward()",
    ],
    "share": 50,
    "remedy": "give the thawed parameters to the optimizer with add_param_group, or leave them frozen",
    "without": [["            thaw(model, 2)\n", "            pass\n"]],
}

TOKENS, LENGTH, TOPICS = 2000, 48, 8


class Classifier(nn.Module):
    def __init__(self, width=128, heads=4, blocks=4):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(blocks)
            ]
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, TOPICS))

    def forward(self, text):
        hidden = self.tokens(text) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def reviews(count):
    """Return texts in which some words belong to a topic."""
    topics = torch.randint(TOPICS, (count,))
    text = torch.randint(TOKENS, (count, LENGTH))
    about = torch.rand(count, LENGTH) < 0.15
    words = topics[:, None] + TOPICS * torch.randint(TOKENS // TOPICS, (count, LENGTH))
    return torch.where(about, words, text), topics


def freeze(model):
    model.requires_grad_(False)
    model.head.requires_grad_(True)


def thaw(model, count):
    for block in model.blocks[-count:]:
        block.requires_grad_(True)


def main(steps=90, size=16, thaw_at=6):
    torch.manual_seed(75)
    text, topics = reviews(4000)
    model = Classifier()
    freeze(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    for step in range(steps):
        if step == thaw_at:
            thaw(model, 2)
        pick = torch.randint(len(text), (size,))
        loss = F.cross_entropy(model(text[pick]), topics[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 30 == 29:
            print(f"step {step + 1}: loss {loss.item():.3f}")


main()
