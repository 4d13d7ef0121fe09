"""A tagger with a confusion matrix that a Python loop fills."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "truth": "A confusion matrix filled by a Python loop over 4096 predictions takes most of each step.",
    "cause": "host-python",
    "also": ["logging"],
    "never": ["data-loading", "evaluation", "start-up"],
    "healthy": False,
}


class Tagger(nn.Module):
    def __init__(self, words=2000, tags=17):
        super().__init__()
        self.embed = nn.Embedding(words, 32)
        self.out = nn.Linear(32, tags)

    def forward(self, x):
        return self.out(self.embed(x))


def update_confusion(matrix, predictions, targets):
    for p, t in zip(predictions.flatten(), targets.flatten()):
        matrix[int(t)][int(p)] += 1


def main():
    torch.manual_seed(1)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    confusion = [[0] * 17 for _ in range(17)]
    for it in range(60):
        x = torch.randint(0, 2000, (32, 128))
        y = x % 17
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, 17), y.view(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_confusion(confusion, logits.argmax(-1), y)
        if it % 20 == 0:
            print(it, loss.item())


if __name__ == "__main__":
    main()
