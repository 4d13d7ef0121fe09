"""Kinds of leaves from a frozen convolutional encoder, of which only the head is trained, on augmented images."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "The frozen encoder runs in each step because each image is cropped and flipped anew; it records no graph, and its convolutions take nearly all the time.",
    "cause": None,
    "also": [],
    "never": [
        "unused-gradients",
        "duplicate-forward",
        "evaluation",
        "wrong-mode",
        "data-loading",
        "growth",
        "cut-gradients",
        "unused-outputs",
        "no-update",
    ],
    "healthy": True,
}


def block(n_in, n_out, stride):
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(n_out),
        nn.ReLU(inplace=True),
    )


class Encoder(nn.Module):
    """Stand-in for a pretrained network: filters with fixed, orthogonal weights."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(block(3, 32, 1), block(32, 48, 2), block(48, 64, 2), block(64, 64, 1))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.orthogonal_(module.weight)

    def forward(self, images):
        features = self.blocks(images)
        return torch.cat([features.mean((2, 3)), features.amax((2, 3))], 1)


class LeafModel(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.encoder = Encoder().requires_grad_(False)
        self.head = nn.Sequential(
            nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, kinds)
        )

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, images):
        with torch.no_grad():
            features = self.encoder(images)
        return self.head(features)


def leaves(count, kinds, size=44):
    labels = torch.randint(kinds, (count,))
    line = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(line, line, indexing="ij")
    angle, radius = torch.atan2(y, x), (x**2 + y**2).sqrt()
    edge = 0.6 + 0.2 * torch.cos(angle * (labels[:, None, None] + 2))
    shape = torch.sigmoid(20 * (edge - radius))
    tint = torch.rand(count, 3, 1, 1) * torch.tensor([0.4, 1.0, 0.3]).view(1, 3, 1, 1)
    return shape[:, None] * tint + 0.1 * torch.randn(count, 3, size, size), labels


def augmented(images, size=40):
    top, left = torch.randint(images.shape[-1] - size + 1, (2,)).tolist()
    images = images[:, :, top : top + size, left : left + size]
    images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    return images * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1))


def main(epochs=14, size=32, kinds=5):
    torch.manual_seed(18)
    images, labels = leaves(512, kinds)
    model = LeafModel(kinds).train()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=2e-3)
    for epoch in range(epochs):
        right = 0
        for rows in torch.randperm(len(labels)).split(size):
            logits = model(augmented(images[rows]))
            loss = F.cross_entropy(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(1) == labels[rows]).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / len(labels):.3f}")


if __name__ == "__main__":
    main()
