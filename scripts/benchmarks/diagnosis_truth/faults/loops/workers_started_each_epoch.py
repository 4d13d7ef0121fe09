"""Kinds of cells under a microscope: few labelled images, many short epochs, and augmentation in worker processes."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 15,
    "truth": "The data loader starts two worker processes and ends them again in each epoch, and an epoch has only five batches: 49% of the loop's time.",
    "cause": "data-loading",
    "also": ["periodic-pause"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "small-operators", "no-update", "padding"],
    "healthy": False,
    "place": [
        "loader = DataLoader(Cells(160), batch_size=32, shuffle=True, num_workers=2)",
        "for images, kinds in loader:",
        "for epoch in range(epochs):",
    ],
    "share": 49,
    "remedy": "keep the workers with persistent_workers=True, or load in the main process",
    "without": [["num_workers=2)", "num_workers=2, persistent_workers=True)"]],
}


class Cells(Dataset):
    """Images of round, long and ringed cells, turned and shifted at random."""

    def __init__(self, count, size=40, seed=15):
        rng = np.random.default_rng(seed)
        self.kinds = rng.integers(0, 3, count)
        line = np.linspace(-1, 1, size)
        y, x = np.meshgrid(line, line, indexing="ij")
        images = []
        for kind in self.kinds:
            wide, high = rng.uniform(0.3, 0.5, 2) * ((1, 0.4) if kind == 1 else (1, 1))
            radius = np.sqrt((x / wide) ** 2 + (y / high) ** 2)
            image = np.exp(-((radius - 1) ** 2) * 8) if kind == 2 else 1 / (1 + np.exp(6 * (radius - 1)))
            images.append(image + 0.2 * rng.standard_normal(image.shape))
        self.images = np.stack(images).astype(np.float32)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        image = np.rot90(self.images[index], np.random.randint(4))
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        image = np.roll(image, np.random.randint(-4, 5, 2), (0, 1)) * np.random.uniform(0.8, 1.2)
        return torch.from_numpy(np.ascontiguousarray(image, np.float32))[None], int(self.kinds[index])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 3)

    def forward(self, images):
        return self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))


def main(epochs=18):
    torch.manual_seed(15)
    loader = DataLoader(Cells(160), batch_size=32, shuffle=True, num_workers=2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        right = 0
        for images, kinds in loader:
            logits = model(images)
            loss = F.cross_entropy(logits, kinds, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            right += (logits.argmax(1) == kinds).sum().item()
        if epoch % 6 == 5:
            print(f"epoch {epoch + 1}: accuracy {right / 160:.3f}")


if __name__ == "__main__":
    main()
