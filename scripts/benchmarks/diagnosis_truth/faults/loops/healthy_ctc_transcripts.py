"""Handwriting lines to text with the CTC loss: long narrow pictures, a convolutional encoder and a softmax per column."""

import torch
from torch import nn

CASE = {
    "generation": 8,
    "truth": "The CTC loss over 160 columns takes a large part of the step, as its recursion over columns and labels demands; the rest is convolutions.",
    "cause": None,
    "also": [],
    "never": ["small-operators", "host-python", "padding", "logits", "no-update", "data-loading", "growth", "logging"],
    "healthy": True,
}

ALPHABET, BLANK = 40, 0


class LineReader(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=(2, 1), padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=(2, 2), padding=1), nn.ReLU(),
            nn.Conv2d(32, width, 3, stride=(2, 1), padding=1), nn.ReLU(),
        )  # fmt: skip
        self.columns = nn.Sequential(
            nn.Conv1d(2 * width, 96, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(96, 96, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(96, ALPHABET, 1),
        )

    def forward(self, x):
        h = self.encoder(x)
        return self.columns(h.flatten(1, 2)).permute(2, 0, 1).log_softmax(2)


def lines(count, letters, glyphs, columns=320):
    """Glyphs pasted at irregular distances into a line, and their indices."""
    text = torch.randint(1, ALPHABET, (count, letters))
    picture = 0.3 * torch.randn(count, 1, 16, columns)
    slot = columns // letters
    for k in range(letters):
        start = k * slot + int(torch.randint(0, max(1, slot - 7), ()))
        picture[:, 0, :, start : start + 6] += glyphs[text[:, k]]
    return picture, text


def main(steps=120, batch=6, letters=36):
    torch.manual_seed(41)
    glyphs = (torch.rand(ALPHABET, 16, 6) > 0.5).float()
    pictures, texts = lines(480, letters, glyphs)
    reader = LineReader()
    ctc = nn.CTCLoss(blank=BLANK, zero_infinity=True)
    optimizer = torch.optim.SGD(reader.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    columns = torch.full((batch,), 160)
    lengths = torch.full((batch,), letters)
    for step in range(steps):
        pick = torch.randint(len(pictures), (batch,))
        log_probabilities = reader(pictures[pick])
        loss = ctc(log_probabilities, texts[pick], columns, lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 5.0)
        optimizer.step()
        if step % 30 == 0:
            blanks = (log_probabilities.argmax(2) == BLANK).float().mean()
            print(f"step {step}: ctc {loss.item():.3f}, {blanks.item():.0%} blank")


if __name__ == "__main__":
    main()
