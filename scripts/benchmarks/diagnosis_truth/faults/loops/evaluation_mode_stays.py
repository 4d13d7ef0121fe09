"""Recommendation of films with a variational autoencoder over each viewer's likes."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "recall() switches the model to evaluation mode and nothing switches it back: from the second epoch on there is no dropout and no sampling, and the model learns its training viewers by heart. Measured: training loss 104.7 and recall@50 0.074 at the end, 149.7 and 0.083 without the fault.",
    "cause": "wrong-mode",
    "also": [],
    "never": ["data-loading", "logging", "growth", "start-up", "padding", "host-python", "no-update", "divergence"],
    "healthy": False,
    "place": ["model.eval()", "model.train()", "if self.training", "recall("],
    "remedy": "call model.train() at the start of each epoch",
    "without": [
        ["    model.eval()\n", "    model.train()\n    model.eval()\n"],
        ["    return hits / held_out.sum().item()\n", "    model.train()\n    return hits / held_out.sum().item()\n"],
    ],
}


class MultVAE(nn.Module):
    def __init__(self, films, hidden=200, latent=48, dropout=0.5):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.Sequential(nn.Linear(films, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, films))

    def forward(self, likes):
        mean, log_variance = self.encoder(self.dropout(F.normalize(likes))).chunk(2, 1)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return self.decoder(code), divergence


def viewers(count, films, tastes=20, seen=25):
    liking = torch.randn(tastes, films)
    mixture = torch.distributions.Dirichlet(torch.full((tastes,), 0.15)).sample((count,))
    chosen = (2.0 * mixture @ liking + 0.15 * liking.std() * torch.randn(count, films)).softmax(1)
    films_seen = torch.multinomial(chosen, seen)
    return torch.zeros(count, films).scatter_(1, films_seen, 1.0)


@torch.no_grad()
def recall(model, likes, held_out, top=50):
    model.eval()
    scores, _ = model(likes)
    best = scores.masked_fill(likes > 0, float("-inf")).topk(top).indices
    hits = held_out.gather(1, best).sum().item()
    return hits / held_out.sum().item()


def main(films=1200, batch=100, epochs=25):
    torch.manual_seed(40)
    likes = viewers(1400, films)
    train, test = likes[:1000], likes[1000:]
    shown = test * (torch.rand_like(test) < 0.7)
    model = MultVAE(films)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        total = 0.0
        for pick in torch.randperm(len(train)).split(batch):
            scores, divergence = model(train[pick])
            likelihood = (F.log_softmax(scores, 1) * train[pick]).sum(1)
            loss = (0.2 * divergence - likelihood).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(pick)
        found = recall(model, shown, test - shown)
        print(f"epoch {epoch:2d}: loss {total / len(train):.2f}, recall@50 {found:.3f}")


if __name__ == "__main__":
    main()
