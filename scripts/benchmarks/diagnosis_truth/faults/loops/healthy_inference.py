"""Inference alone: batches through a trained network, no optimizer."""

import torch
from torch import nn

CASE = {
    "truth": "An inference loop without an optimizer; its time is the convolutions.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "skipped-steps", "no-update", "evaluation"],
    "healthy": True,
}


@torch.inference_mode()
def predict(model, batches):
    return torch.cat([model(b).argmax(1) for b in batches])


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    ).eval()
    print(predict(model, (torch.randn(16, 3, 32, 32) for _ in range(60))).bincount().tolist())
