"""Variational autoencoder of absorption spectra with a code that should tell mixtures apart."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

CASE = {
    "generation": 11,
    "truth": "The code is drawn with sample() instead of rsample(), so the reconstruction sends no gradient to the encoder: only the divergence trains it, the code becomes noise and the decoder learns the mean spectrum.",
    "cause": "cut-gradients",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "host-python",
        "small-operators",
        "start-up",
        "elementwise-chain",
    ],
    "healthy": False,
    "place": ["code = posterior.sample()"],
    "remedy": "rsample()",
    "without": [["        code = posterior.sample()\n", "        code = posterior.rsample()\n"]],
}


class SpectrumVAE(nn.Module):
    def __init__(self, channels=400, latent=6, width=384):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(channels, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2 * latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, channels)
        )

    def forward(self, spectrum):
        mean, spread = self.encoder(spectrum).chunk(2, 1)
        posterior = Normal(mean, F.softplus(spread) + 1e-4)
        code = posterior.sample()
        return self.decoder(code), posterior


def mixtures(count, channels=400, substances=5):
    """Each spectrum is a mixture of the bands of a few substances."""
    axis = torch.linspace(0, 1, channels)
    centre, width = torch.rand(substances, 4, 1), 0.01 + 0.04 * torch.rand(substances, 4, 1)
    bands = torch.exp(-(((axis - centre) / width) ** 2)).sum(1)
    amount = torch.distributions.Dirichlet(torch.full((substances,), 0.6)).sample((count,))
    return 3 * amount @ bands + 0.03 * torch.randn(count, channels)


def elbo(model, spectrum, weight):
    output, posterior = model(spectrum)
    prior = Normal(torch.zeros_like(posterior.mean), torch.ones_like(posterior.mean))
    error = F.mse_loss(output, spectrum, reduction="none").sum(1).mean()
    return error, error + weight * kl_divergence(posterior, prior).sum(1).mean()


def main(epochs=8, batch=128):
    torch.manual_seed(12)
    spectra = mixtures(3072)
    model = SpectrumVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        weight, total = 0.2 * min(1.0, (epoch + 1) / 3), 0.0
        for pick in torch.randperm(len(spectra)).split(batch):
            error, loss = elbo(model, spectra[pick], weight)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += error.item()
        print(f"epoch {epoch}: squared error per spectrum {total * batch / len(spectra):.2f}")


if __name__ == "__main__":
    main()
