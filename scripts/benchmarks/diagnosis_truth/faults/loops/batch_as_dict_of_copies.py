"""Topics of papers from their citations: sampled neighbours, and batches as dataclasses."""

from dataclasses import asdict, dataclass

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "A batch is handed to the model as asdict(batch), which deep-copies each tensor of it, the features of all 20,000 papers included, in each step.",
    "cause": "needless-copies",
    "also": ["host-python"],
    "never": ["data-loading", "growth", "start-up", "logging", "no-update", "evaluation", "small-operators"],
    "healthy": False,
    "place": ["logits = model(**asdict(batch))", "from dataclasses import asdict, dataclass"],
    "share": 22,
    "remedy": "model(**vars(batch)), which hands the tensors over as they are",
    "without": [["model(**asdict(batch))", "model(**vars(batch))"]],
}


@dataclass
class Batch:
    features: torch.Tensor  # of all papers
    seeds: torch.Tensor
    neighbours: torch.Tensor


class Papers:
    def __init__(self, papers, words, topics, degree):
        self.topic = torch.randint(topics, (papers,))
        self.features = 0.4 * torch.randn(topics, words)[self.topic] + torch.randn(papers, words)
        self.cites = torch.randint(papers, (papers, degree))

    def batches(self, size, fanout):
        for seeds in torch.randperm(len(self.topic)).split(size):
            pick = torch.randint(self.cites.shape[1], (len(seeds), fanout))
            yield Batch(self.features, seeds, self.cites[seeds].gather(1, pick)), self.topic[seeds]


class Sage(nn.Module):
    def __init__(self, words, width, topics):
        super().__init__()
        self.own, self.around = nn.Linear(words, width), nn.Linear(words, width, bias=False)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, topics))

    def forward(self, features, seeds, neighbours):
        around = features[neighbours].mean(1)
        return self.head(self.own(features[seeds]) + self.around(around))


if __name__ == "__main__":
    torch.manual_seed(17)
    papers = Papers(20_000, 256, 12, 10)
    model = Sage(256, 256, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, 6):
        hits = torch.zeros(())
        for batch, topic in papers.batches(size=512, fanout=5):
            logits = model(**asdict(batch))
            loss = criterion(logits, topic)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += (logits.argmax(1) == topic).sum()
        print(f"epoch {epoch}: accuracy {hits.item() / 20_000:.3f}")
