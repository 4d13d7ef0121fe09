"""Four-fold super-resolution with a loss on deep features."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "The network of the feature loss is not frozen: backward computes gradients of all its weights, and runs "
    "through its pass over the real images too, though the optimizer holds the generator only. Measured: 35%.",
    "cause": "unused-gradients",
    "also": ["duplicate-forward"],
    "never": ["data-loading", "launch-bound", "host-sync", "fp32-products"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["loss_network()"],
}

STEPS = 60
BATCH = 16
SIDE = 48
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + 0.1 * self.second(F.relu(self.first(x), inplace=True))


class Generator(nn.Module):
    def __init__(self, width=64, blocks=8):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.up = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x):
        x = self.head(x)
        return self.up(x + self.body(x))


def loss_network():
    """The convolutions of a network with 16 layers, up to the last activation."""
    layers, channels = [], 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
    return nn.Sequential(*layers).eval()


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
generator = Generator().to(device, memory_format=torch.channels_last)
features = loss_network().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.9, 0.99), fused=True)
bank = torch.rand(8, BATCH, 3, 4 * SIDE, 4 * SIDE, device=device)

for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    real = bank[step % 8].contiguous(memory_format=torch.channels_last)
    small = F.avg_pool2d(real, 4)
    with torch.autocast(device, torch.bfloat16):
        fake = generator(small)
        pixels = F.l1_loss(fake.float(), real)
        perceptual = F.mse_loss(features(fake).float(), features(real).float())
        loss = pixels + 0.1 * perceptual
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
elapsed = clock() - start
print(f"loss {loss.item():.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
