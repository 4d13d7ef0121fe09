"""Pretraining by replaced tokens: a small generator fills gaps, and a larger network finds what was filled in."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "Tokens that the generator samples carry no gradient on purpose, both networks read the same text because the second judges the first one's choices, and the generator's head reads the gaps alone; products of the second network take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "cut-gradients",
        "duplicate-forward",
        "unused-outputs",
        "logits",
        "dense-gradient",
        "unfused-attention",
        "growth",
        "data-loading",
        "gradients-not-cleared",
    ],
    "healthy": True,
}

TOKENS, LENGTH, GAP = 600, 64, 0


def text(count):
    """Return sentences in which each token follows from the one before it, with some surprise."""
    follow = 1 + ((TOKENS - 1) * torch.rand(TOKENS, 3) ** 4).long()
    rows = [torch.randint(1, TOKENS, (count,))]
    for _ in range(LENGTH - 1):
        rows.append(follow[rows[-1], torch.randint(3, (count,))])
    return torch.stack(rows, 1)


class Encoder(nn.Module):
    def __init__(self, tokens, width, heads, blocks):
        super().__init__()
        self.tokens = tokens
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, tokens.embedding_dim))
        self.enter = nn.Linear(tokens.embedding_dim, width)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(blocks)
            ]
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, numbers):
        hidden = self.enter(self.tokens(numbers) + self.places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


class ReplacedTokens(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        tokens = nn.Embedding(TOKENS, dim)
        nn.init.normal_(tokens.weight, std=0.05)
        self.generator = Encoder(tokens, 64, 2, 1)
        self.back = nn.Linear(64, dim)
        self.judge = Encoder(tokens, 192, 4, 2)
        self.verdict = nn.Linear(192, 1)

    def forward(self, numbers):
        gaps = torch.rand(numbers.shape) < 0.15
        guesses = self.back(self.generator(numbers.masked_fill(gaps, GAP))[gaps]) @ self.generator.tokens.weight.T
        guess_loss = F.cross_entropy(guesses, numbers[gaps])
        with torch.no_grad():
            filled = numbers.clone()
            filled[gaps] = torch.distributions.Categorical(logits=guesses).sample()
        replaced = (filled != numbers).float()
        verdicts = self.verdict(self.judge(filled)).squeeze(-1)
        judge_loss = F.binary_cross_entropy_with_logits(verdicts, replaced)
        return guess_loss, judge_loss


def main(steps=70, size=8):
    torch.manual_seed(171)
    corpus, model = text(3000), ReplacedTokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(1, steps + 1):
        guess_loss, judge_loss = model(corpus[torch.randint(len(corpus), (size,))])
        optimizer.zero_grad()
        (guess_loss + 50 * judge_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 35 == 0:
            print(f"step {step}: guesses {guess_loss.item():.3f}, verdicts {judge_loss.item():.4f}")


if __name__ == "__main__":
    main()
