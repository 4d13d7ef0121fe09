"""Cell counting in microscope stacks of sixteen focal planes: a fully convolutional net predicts a density map at a quarter of the resolution."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 8,
    "truth": "The images are marked with requires_grad_, left from a saliency map, so backward also computes the first layer's gradient with respect to the pixels, which nothing reads.",
    "cause": "unused-gradients",
    "also": ["growth"],  # the training dies, and its gradients fade to denormals: 14 to 45 ms of CPU time a step
    "never": ["data-loading", "logging", "evaluation", "small-operators", "host-python", "start-up"],
    "healthy": False,
    "place": ["images.requires_grad_()", "loss.backward()"],
    "share": 27,
    "remedy": "remove images.requires_grad_() outside of the saliency maps",
    "without": [["        images.requires_grad_()  # for the saliency maps\n", ""]],
}


class DensityNet(nn.Module):
    def __init__(self, planes=16, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(planes, width, 7, padding=3), nn.ReLU(), nn.MaxPool2d(4))
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 1, 1), nn.Softplus(),
        )  # fmt: skip

    def forward(self, x):
        return self.body(self.stem(x)).squeeze(1)


def cells(count, planes=16, side=56, most=10):
    """Bright blobs on a noisy ground, and the map of their centres."""
    images = 0.2 * torch.randn(count, planes, side, side)
    density = torch.zeros(count, side // 4, side // 4)
    axis = torch.arange(side).float()
    for i in range(count):
        for cy, cx in torch.rand(int(torch.randint(1, most, ())), 2) * (side - 1):
            blob = torch.exp(-((axis[:, None] - cy) ** 2 + (axis[None] - cx) ** 2) / 18)
            images[i] += blob * torch.rand(planes, 1, 1)
            density[i, int(cy) // 4, int(cx) // 4] += 1.0
    return images, density


def saliency(images):
    """Show where the net looked."""
    return images.grad.abs().amax(1)


def train_epoch(model, loader, optimizer):
    model.train()
    total, error = 0.0, 0.0
    for images, density in loader:
        images.requires_grad_()  # for the saliency maps
        predicted = model(images)
        loss = 100 * nn.functional.mse_loss(predicted, density)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item()
        error += (predicted.detach().sum((1, 2)) - density.sum((1, 2))).abs().mean().item()
    return total / len(loader), error / len(loader)


def main():
    torch.manual_seed(5)
    loader = DataLoader(TensorDataset(*cells(120)), batch_size=4, shuffle=True)
    model = DensityNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    for epoch in range(4):
        loss, error = train_epoch(model, loader, optimizer)
        print(f"epoch {epoch}: loss {loss:.3f}, count is off by {error:.2f}")


if __name__ == "__main__":
    main()
