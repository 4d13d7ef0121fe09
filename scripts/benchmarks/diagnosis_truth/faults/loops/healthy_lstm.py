"""torch's own LSTM: a small model, but its time is the recurrence in one operator."""

import torch
from torch import nn

CASE = {
    "truth": "A character model with nn.LSTM; the recurrence takes the time, as it must.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "small-operators", "evaluation"],
    "healthy": True,
}


class CharModel(nn.Module):
    def __init__(self, vocabulary=90, width=192):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 48)
        self.lstm = nn.LSTM(48, width, num_layers=1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x, state=None):
        out, state = self.lstm(self.embed(x), state)
        return self.head(out), tuple(s.detach() for s in state)


def main():
    torch.manual_seed(0)
    text = torch.randint(0, 90, (32, 50 * 40 + 1))
    model, state = CharModel(), None
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for i in range(40):
        x, y = text[:, i * 50 : i * 50 + 50], text[:, i * 50 + 1 : i * 50 + 51]
        logits, state = model(x, state)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    print(f"bits per character {loss.item() / 0.6931:.2f}")


main()
