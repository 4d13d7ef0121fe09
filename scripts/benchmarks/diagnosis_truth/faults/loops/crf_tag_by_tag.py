"""A tagger with a recurrent encoder and a conditional random field written by hand."""

import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "The normaliser of the CRF is computed for each position and each tag alone: over a thousand small operators per batch.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "logging", "padding"],
    "healthy": False,
    "place": [
        "for tag in range(self.tags)",
        "scores = alpha + self.transitions[tag]",
        "column.append(",
        "alpha = torch.stack(column, 1)",
        "for emission in emissions.unbind(1)",
        "self.normaliser(emissions)",
        "crf(",
    ],
    "share": 72,
    "remedy": "one logsumexp over a matrix of (tag, previous tag) for each position",
    "without": [
        [
            "            column = []\n            for tag in range(self.tags):\n                scores = alpha + self.transitions[tag]\n                column.append(torch.logsumexp(scores, 1) + emission[:, tag])\n            alpha = torch.stack(column, 1)\n",
            "            alpha = torch.logsumexp(alpha[:, None] + self.transitions, 2) + emission\n",
        ]
    ],
}


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.tags = tags
        self.transitions = nn.Parameter(0.1 * torch.randn(tags, tags))

    def normaliser(self, emissions):
        alpha = emissions.new_zeros(len(emissions), self.tags)
        for emission in emissions.unbind(1):
            column = []
            for tag in range(self.tags):
                scores = alpha + self.transitions[tag]
                column.append(torch.logsumexp(scores, 1) + emission[:, tag])
            alpha = torch.stack(column, 1)
        return torch.logsumexp(alpha, 1)

    def score(self, emissions, tags):
        unary = emissions.gather(2, tags[..., None]).squeeze(2).sum(1)
        return unary + self.transitions[tags[:, 1:], tags[:, :-1]].sum(1)

    def forward(self, emissions, tags):
        return (self.normaliser(emissions) - self.score(emissions, tags)).mean()


class Tagger(nn.Module):
    def __init__(self, words=2000, tags=17):
        super().__init__()
        self.words = nn.Embedding(words, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True, bidirectional=True)
        self.project = nn.Linear(128, tags)

    def forward(self, ids):
        return self.project(self.lstm(self.words(ids))[0])


torch.manual_seed(0)
tagger, crf = Tagger(), CRF(17)
optimizer = torch.optim.Adam([*tagger.parameters(), *crf.parameters()], lr=1e-3)
sentences = torch.randint(0, 2000, (512, 16))
labels = sentences % 17

for epoch in range(3):
    for first in range(0, 512, 32):
        words, tags = sentences[first : first + 32], labels[first : first + 32]
        optimizer.zero_grad()
        loss = crf(tagger(words), tags)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: negative log-likelihood {loss.item():.2f}")
