"""Ripeness of fruit from spectra: five folds of cross-validation, each with a new model and optimizer."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Each of the five folds begins with a new model and a new optimizer, so that the loss jumps up on purpose; each fold is tested once at its end, and convolutions take the time.",
    "cause": None,
    "also": [],
    "never": [
        "lost-state",
        "undone-update",
        "divergence",
        "no-update",
        "growth",
        "evaluation",
        "start-up",
        "model-copies",
        "data-loading",
        "same-randomness",
    ],
    "healthy": True,
}

BANDS, FOLDS = 240, 5


def spectra(count):
    """Return reflectances of fruit, and the share of sugar that deepens some of the valleys."""
    sugar = 8 + 6 * torch.rand(count, 1)
    band = torch.linspace(0, 1, BANDS)
    base = 0.6 + 0.3 * torch.sin(3 * band + torch.rand(count, 1))
    valleys = sum(torch.exp(-((band - place) ** 2) / 0.002) for place in (0.25, 0.5, 0.8))
    light = 0.8 + 0.4 * torch.rand(count, 1)
    return (light * (base - 0.02 * sugar * valleys) + 0.01 * torch.randn(count, BANDS))[:, None], sugar.squeeze(1)


def make_net(width=32):
    return nn.Sequential(
        nn.Conv1d(1, width, 11, padding=5), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Conv1d(width, width, 11, padding=5), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(width, 2 * width, 7, padding=3), nn.BatchNorm1d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, 1),
    )  # fmt: skip


def fit(inputs, wanted, epochs, size):
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for _ in range(epochs):
        for pick in torch.randperm(len(inputs)).split(size):
            loss = F.mse_loss(model(inputs[pick]).squeeze(1), wanted[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def error(model, inputs, wanted):
    return (model(inputs).squeeze(1) - wanted).abs().mean().item()


def main(epochs=3, size=32):
    torch.manual_seed(71)
    inputs, sugar = spectra(400)
    middle, spread = sugar.mean(), sugar.std()
    wanted = (sugar - middle) / spread
    errors = []
    for fold, held in enumerate(torch.randperm(len(inputs)).chunk(FOLDS)):
        kept = torch.ones(len(inputs), dtype=torch.bool)
        kept[held] = False
        model = fit(inputs[kept], wanted[kept], epochs, size)
        errors.append(error(model, inputs[held], wanted[held]) * spread.item())
        print(f"fold {fold}: off by {errors[-1]:.2f}")
    print(f"all folds: off by {sum(errors) / FOLDS:.2f}")


if __name__ == "__main__":
    main()
