"""Binary survey answers and a latent attitude: an importance-weighted autoencoder."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

CASE = {
    "generation": 16,
    "truth": "The bound needs 40 samples of the latent vector, and the decoder runs for one of them after the other, on few small rows, instead of once for all: 87% of the loop's time.",
    "cause": "small-operators",
    "also": ["duplicate-forward"],
    "never": ["data-loading", "growth", "evaluation", "logging", "checkpoint-writing", "start-up"],
    "healthy": False,
    "place": [
        "for _ in range(samples):",
        "latent = posterior.rsample()",
        'answer = -F.binary_cross_entropy_with_logits(self.decoder(latent), answers, reduction="none").sum(1)',
        "weights.append(answer + prior.log_prob(latent).sum(1) - posterior.log_prob(latent).sum(1))",
        "loss = -model.bound(batch)",
    ],
    "share": 87,
    "remedy": "draw all samples with rsample((samples,)) and run the decoder once",
    "without": [
        ["        weights = []\n        for _ in range(samples):\n", "        if True:\n"],
        ["posterior.rsample()", "posterior.rsample((samples,))"],
        [
            'answer = -F.binary_cross_entropy_with_logits(self.decoder(latent), answers, reduction="none").sum(1)',
            'answer = -F.binary_cross_entropy_with_logits(self.decoder(latent), answers.expand(samples, -1, -1), reduction="none").sum(-1)',
        ],
        [
            "weights.append(answer + prior.log_prob(latent).sum(1) - posterior.log_prob(latent).sum(1))",
            "weights = answer + prior.log_prob(latent).sum(-1) - posterior.log_prob(latent).sum(-1)",
        ],
        ["torch.stack(weights)", "weights"],
    ],
}

QUESTIONS, LATENT = 30, 4


def survey(people):
    """Return yes and no to each question, by a few attitudes that nobody sees."""
    attitudes = torch.randn(people, LATENT)
    chance = torch.sigmoid(attitudes @ torch.randn(LATENT, QUESTIONS) * 1.5 + torch.randn(QUESTIONS))
    return (torch.rand(people, QUESTIONS) < chance).float()


class Attitudes(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(QUESTIONS, hidden), nn.Tanh(), nn.Linear(hidden, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, hidden), nn.Tanh(), nn.Linear(hidden, QUESTIONS))

    def bound(self, answers, samples=40):
        centre, spread = self.encoder(answers).chunk(2, 1)
        posterior = Normal(centre, F.softplus(spread) + 1e-3, validate_args=False)
        prior = Normal(0.0, 1.0, validate_args=False)
        weights = []
        for _ in range(samples):
            latent = posterior.rsample()
            answer = -F.binary_cross_entropy_with_logits(self.decoder(latent), answers, reduction="none").sum(1)
            weights.append(answer + prior.log_prob(latent).sum(1) - posterior.log_prob(latent).sum(1))
        return (torch.logsumexp(torch.stack(weights), 0) - math.log(samples)).mean()


def main(steps=160, size=32):
    torch.manual_seed(63)
    people = survey(2000)
    model = Attitudes()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = people[torch.randint(len(people), (size,))]
        loss = -model.bound(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}: bound {-loss.item():.3f}")


if __name__ == "__main__":
    main()
