"""Quantisation-aware training: weights and activations of four bits, with gradients passed straight through."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 14,
    "truth": "Weights and inputs are rounded to four bits, which has no gradient, but a custom function passes the gradient through as quantisation-aware training does; all layers learn. Products take the time.",
    "cause": None,
    "also": [],
    "never": ["cut-gradients", "no-update", "needless-copies", "slow-precision", "host-python", "unused-gradients"],
    "healthy": True,
}


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x / scale).round_().clamp_(-8, 7).mul_(scale)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class QuantLinear(nn.Linear):
    def forward(self, x):
        weight = Rounded.apply(self.weight, self.weight.detach().abs().amax() / 7)
        return F.linear(x, weight, self.bias)


def build(sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [QuantLinear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def main(steps=80, batch=1024):
    torch.manual_seed(41)
    net, centres = build([256, 384, 384, 32]), torch.randn(32, 256)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    for step in range(steps):
        label = torch.randint(32, (batch,))
        loss = F.cross_entropy(net(centres[label] + torch.randn(batch, 256)), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(step + 1, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
