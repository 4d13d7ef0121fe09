"""Capsule network with dynamic routing, on drawn glyphs of ten kinds."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = {
    "generation": 14,
    "truth": "The layer of capsules stacks a copy of its weights for each sample of the batch before it multiplies: 24 MB of copies each step, and as much again for their gradient.",
    "cause": "needless-copies",
    "also": ["slow-products"],
    "never": ["data-loading", "growth", "start-up", "logging", "no-update", "evaluation", "host-python"],
    "healthy": False,
    "place": [
        "weights = torch.stack([self.W] * len(u), dim=0)",
        "u_hat = torch.matmul(weights, u[:, :, None, :, None]).squeeze(-1)",
    ],
    "share": 61,
    "remedy": 'one einsum over the shared weights: torch.einsum("nkod,bnd->bnko", self.W, u)',
    "without": [
        [
            "        weights = torch.stack([self.W] * len(u), dim=0)\n        u_hat = torch.matmul(weights, u[:, :, None, :, None]).squeeze(-1)\n",
            '        u_hat = torch.einsum("nkod,bnd->bnko", self.W, u)\n',
        ]
    ],
}


def squash(s):
    norm = (s * s).sum(-1, keepdim=True)
    return norm / (1 + norm) * s / torch.sqrt(norm + 1e-8)


class PrimaryCaps(nn.Module):
    def __init__(self, channels, dim):
        super().__init__()
        self.dim = dim
        self.conv = nn.Conv2d(channels, 32 * dim, 5, stride=2)

    def forward(self, x):
        x = self.conv(x)
        return squash(x.view(len(x), 32, self.dim, -1).transpose(2, 3).reshape(len(x), -1, self.dim))


class DigitCaps(nn.Module):
    def __init__(self, inputs, classes, dim_in, dim_out, iterations=3):
        super().__init__()
        self.W = nn.Parameter(0.05 * torch.randn(inputs, classes, dim_out, dim_in))
        self.iterations = iterations

    def forward(self, u):
        weights = torch.stack([self.W] * len(u), dim=0)
        u_hat = torch.matmul(weights, u[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(u_hat.shape[:3])
        for i in range(self.iterations):
            c = F.softmax(b, dim=2)
            v = squash((c.unsqueeze(-1) * u_hat).sum(1))
            if i < self.iterations - 1:
                b = b + (u_hat.detach() * v.detach().unsqueeze(1)).sum(-1)
        return v


class CapsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 5, stride=2)
        self.primary = PrimaryCaps(32, 8)
        self.digits = DigitCaps(32 * 9, 10, 8, 16)

    def forward(self, x):
        return self.digits(self.primary(F.relu(self.conv(x)))).norm(dim=-1)


def margin_loss(lengths, labels):
    one = F.one_hot(labels, lengths.shape[1]).float()
    present = F.relu(0.9 - lengths) ** 2
    absent = F.relu(lengths - 0.1) ** 2
    return (one * present + 0.5 * (1 - one) * absent).sum(1).mean()


def glyphs(count):
    strokes = torch.randn(10, 1, 23, 23, generator=torch.Generator().manual_seed(1)).clamp(0)
    labels = torch.randint(10, (count,))
    return strokes[labels] + 0.3 * torch.randn(count, 1, 23, 23), labels


def main():
    torch.manual_seed(0)
    model = CapsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images, labels = glyphs(16 * 60)
    for i in range(60):
        batch = slice(16 * i, 16 * i + 16)
        lengths = model(images[batch])
        loss = margin_loss(lengths, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 15 == 14:
            hits = (lengths.argmax(1) == labels[batch]).float().mean()
            print(f"[{i + 1}/60] loss {loss.item():.4f} accuracy {hits.item():.2f}")


if __name__ == "__main__":
    main()
