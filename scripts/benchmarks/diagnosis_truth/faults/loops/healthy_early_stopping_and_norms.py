"""Sleep stages from a night of measurements: early stopping after each epoch, and norms of layers for a log."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "Each epoch of 25 steps ends with a validation of a tenth of its size and a copy of small weights, and hooks compute norms in one step of 25; convolutions take the time.",
    "cause": None,
    "also": [],
    "never": [
        "evaluation",
        "checkpoint-writing",
        "logging",
        "growth",
        "periodic-pause",
        "host-sync",
        "model-copies",
        "wrong-mode",
        "needless-copies",
        "undone-update",
    ],
    "healthy": True,
}

STAGES, SAMPLES, CHANNELS = 5, 300, 4


def night(count):
    """Return pieces of a recording whose slow and fast waves tell the stage."""
    stage = torch.randint(STAGES, (count,))
    time = torch.linspace(0, 3, SAMPLES)
    rate = torch.tensor([10.0, 7.0, 5.0, 2.0, 8.0])[stage][:, None, None] * (0.9 + 0.2 * torch.rand(count, 1, 1))
    wave = torch.sin(6.28 * rate * time + 6.28 * torch.rand(count, CHANNELS, 1))
    return wave + 0.8 * torch.randn(count, CHANNELS, SAMPLES), stage


class Norms:
    """Hooks that keep the norm of each layer's output, while they are switched on."""

    def __init__(self, model):
        self.on, self.found = False, {}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Conv1d):
                layer.register_forward_hook(self.hook(name))

    def hook(self, name):
        def keep(layer, inputs, output):
            if self.on:
                self.found[name] = output.detach().square().mean().sqrt().item()

        return keep


def make_net(width=32):
    return nn.Sequential(
        nn.Conv1d(CHANNELS, width, 9, padding=4), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Conv1d(width, width, 9, padding=4), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(width, 2 * width, 9, padding=4), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(2 * width, 2 * width, 9, padding=4), nn.BatchNorm1d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(2 * width, STAGES),
    )  # fmt: skip


def validate(model, inputs, stages):
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs), stages).item()
    model.train()
    return loss


def main(epochs=6, batch=32, patience=3):
    torch.manual_seed(79)
    inputs, stages = night(800)
    held = night(80)
    model = make_net()
    norms = Norms(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    lowest, best, waited = float("inf"), None, 0
    for epoch in range(epochs):
        for number, pick in enumerate(torch.randperm(len(inputs)).split(batch)):
            norms.on = number == 0
            loss = F.cross_entropy(model(inputs[pick]), stages[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        norms.on = False
        found = validate(model, *held)
        print(f"epoch {epoch}: {found:.4f}, norms " + ", ".join(f"{norm:.2f}" for norm in norms.found.values()))
        if found < lowest:
            lowest, best, waited = found, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
            if waited == patience:
                break
    model.load_state_dict(best)


if __name__ == "__main__":
    main()
