"""Pictures of banded ornaments, pixel by pixel: convolutions whose weights are masked so that no pixel sees a later one."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "Weights are multiplied by a mask in each forward pass, which is small next to the convolutions; the pictures are scored at all pixels in parallel, a moving average of the weights is kept by one fused update, and some pictures are drawn once at the end.",
    "cause": None,
    "also": [],
    "never": [
        "evaluation",
        "model-copies",
        "needless-copies",
        "small-operators",
        "logits",
        "host-python",
        "data-loading",
        "growth",
        "kept-by-reference",
        "unused-gradients",
    ],
    "healthy": True,
}

SIZE, GREYS = 24, 8


def ornaments(count):
    """Return bands of eight greys that follow each other, in any direction and width."""
    line = torch.arange(SIZE)
    down, across, start = torch.rand(3, count, 1, 1) * torch.tensor([0.9, 0.9, GREYS])[:, None, None, None]
    return (start + down * line[:, None] + across * line).long() % GREYS


class MaskedConv2d(nn.Conv2d):
    def __init__(self, inputs, outputs, size, see_centre):
        super().__init__(inputs, outputs, size, padding=size // 2)
        mask = torch.ones_like(self.weight)
        mask[:, :, size // 2, size // 2 + int(see_centre) :] = 0
        mask[:, :, size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width // 2, 1),
            nn.ReLU(), MaskedConv2d(width // 2, width // 2, 5, True),
            nn.ReLU(), nn.Conv2d(width // 2, width, 1),
        )  # fmt: skip

    def forward(self, x):
        return x + self.layers(x)


class PixelNet(nn.Module):
    def __init__(self, width=48, blocks=4):
        super().__init__()
        self.enter = MaskedConv2d(1, width, 7, False)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(blocks)])
        self.out = nn.Sequential(nn.ReLU(), nn.Conv2d(width, GREYS, 1))

    def forward(self, greys):
        return self.out(self.blocks(self.enter(greys[:, None] / (GREYS / 2) - 1)))


@torch.no_grad()
def draw(model, count, rows):
    greys = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for y in range(rows):
        for x in range(SIZE):
            chances = model(greys)[:, :, y, x].softmax(1)
            greys[:, y, x] = torch.multinomial(chances, 1)[:, 0]
    return greys


def main(steps=80, size=16):
    torch.manual_seed(177)
    pictures, model = ornaments(2000), PixelNet().to(memory_format=torch.channels_last)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for step in range(1, steps + 1):
        greys = pictures[torch.randint(len(pictures), (size,))]
        loss = F.cross_entropy(model(greys), greys)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.05)
        if step % 20 == 0:
            print(f"step {step}: {loss.item() / 0.6931:.3f} bits per pixel")
    print(draw(average, 2, rows=1)[0, 0].tolist())


if __name__ == "__main__":
    main()
