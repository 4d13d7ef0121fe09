"""Segmentation of small volumes from a dataset that opens its archive for each item."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 2,
    "truth": "__getitem__ loads the whole compressed archive of all volumes and takes one of them: nearly all of the time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators", "growth", "padding", "logging"],
    "healthy": False,
    "place": ["with np.load(self.path)", 'archive["volumes"][i]', "for volume, mask in loader", "archive["],
    "share": 67,
    "remedy": "open the archive once, or store one file per volume or a memory map",
    "without": [
        [
            '        with np.load(self.path) as archive:\n            volume, mask = archive["volumes"][i], archive["masks"][i]\n',
            "        volume, mask = self.volumes[i], self.masks[i]\n",
        ],
        [
            "        self.path = path\n",
            '        with np.load(path) as archive:\n            self.volumes, self.masks = archive["volumes"], archive["masks"]\n',
        ],
    ],
}


class Volumes(Dataset):
    def __init__(self, path, count):
        self.path = path
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        with np.load(self.path) as archive:
            volume, mask = archive["volumes"][i], archive["masks"][i]
        volume = (volume - volume.mean()) / (volume.std() + 1e-6)
        return torch.from_numpy(volume)[None], torch.from_numpy(mask.astype(np.float32))[None]


class SmallUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.MaxPool3d(2), nn.Conv3d(width, 2 * width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.out = nn.Conv3d(2 * width, 1, 1)

    def forward(self, x):
        high = self.down1(x)
        return self.out(torch.cat([high, self.up(self.down2(high))], 1))


def dice_loss(logits, mask):
    p = logits.sigmoid()
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.npz"
        volumes = rng.standard_normal((60, 16, 16, 16)).astype(np.float32)
        np.savez_compressed(path, volumes=volumes, masks=volumes > 0.5)
        loader = DataLoader(Volumes(path, 60), batch_size=4, shuffle=True, drop_last=True)
        model = SmallUNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for epoch in range(3):
            for volume, mask in loader:
                optimizer.zero_grad(set_to_none=True)
                loss = dice_loss(model(volume), mask)
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch + 1}: dice loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
