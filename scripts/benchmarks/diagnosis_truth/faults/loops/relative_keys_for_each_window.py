"""Land use from aerial tiles: a small window transformer that labels each patch."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "The vector of each relative position is looked up for each window of the batch, though it is the same for all; the backward of this indexing adds up every copy one by one.",
    "cause": "index-backward",
    "also": [],
    "never": ["data-loading", "logging", "evaluation", "growth", "host-python", "no-update", "start-up", "padding"],
    "healthy": False,
    "place": ["self.table[index]", "self.index.expand(", "offsets = self.table["],
    "share": 46,
    "remedy": "look the vectors up once per layer and let the product broadcast them over the windows",
    "without": [["        index = self.index.expand(len(x), -1, -1)\n", "        index = self.index[None]\n"]],
}


class WindowAttention(nn.Module):
    def __init__(self, dim, window, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, dim // heads))
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = place[:, :, None] - place[:, None, :] + window - 1
        self.register_buffer("index", offset[0] * (2 * window - 1) + offset[1])

    def forward(self, x):
        windows, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(windows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        index = self.index.expand(len(x), -1, -1)
        offsets = self.table[index]
        scores = (q @ k.transpose(2, 3) + torch.einsum("nhtd,ntsd->nhts", q, offsets)) / q.shape[-1] ** 0.5
        return self.out((scores.softmax(3) @ v).transpose(1, 2).reshape(windows, tokens, dim))


class Block(nn.Module):
    def __init__(self, dim, window, heads, shift):
        super().__init__()
        self.window, self.shift = window, shift
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.attention = WindowAttention(dim, window, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, h, w, c = x.shape
        n = self.window
        y = torch.roll(self.norms[0](x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // n, n, w // n, n, c).transpose(2, 3).reshape(-1, n * n, c)
        y = self.attention(y).view(b, h // n, w // n, n, n, c).transpose(2, 3).reshape(b, h, w, c)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norms[1](x))


class LandUse(nn.Module):
    def __init__(self, classes=5, dim=48, window=8, depth=3):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(*[Block(dim, window, 4, window // 2 * (i % 2)) for i in range(depth)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x).permute(0, 2, 3, 1)))


def tiles(count, classes=5, cells=16):
    rough = torch.randn(count, classes, 4, 4)
    use = F.interpolate(rough, size=(cells, cells), mode="bilinear").argmax(1)
    colours = torch.rand(classes, 3)
    picture = colours[use].permute(0, 3, 1, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return picture + 0.4 * torch.randn_like(picture), use


def main(steps=120, batch=4):
    torch.manual_seed(9)
    pictures, use = tiles(300)
    model = LandUse()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for step in range(1, steps + 1):
        pick = torch.randint(len(pictures), (batch,))
        logits = model(pictures[pick])
        loss = F.cross_entropy(logits.flatten(0, 2), use[pick].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            right = (logits.argmax(3) == use[pick]).float().mean()
            print(f"step {step}: loss {loss.item():.3f}, {right.item():.1%} of the patches right")


main()
