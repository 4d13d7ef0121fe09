"""Defect detection on metal surfaces with stochastic weight averaging."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 6,
    "truth": "After each epoch of ten steps the averaged network runs over all pictures to refresh its batch norms, which nobody reads yet.",
    "cause": "evaluation",
    "also": ["periodic-pause", "host-python"],
    "never": ["start-up", "data-loading", "growth", "small-operators", "logging", "checkpoint-writing"],
    "healthy": False,
    "place": ["update_bn("],
    "share": 21,
    "remedy": "call update_bn once, after the last epoch",
    "without": [["            update_bn(plain, self.averaged)\n", "            pass\n"]],
}


def conv(n_in, n_out, stride=1):
    return [nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True)]


class Surfaces:
    """Brushed metal, with a scratch, a pit, a stain or nothing."""

    def __init__(self, count, side=32):
        g = torch.Generator().manual_seed(2)
        self.labels = torch.randint(4, (count,), generator=g)
        self.pictures = torch.randn(count, 1, 1, side, generator=g).expand(-1, -1, side, -1).clone()
        self.pictures += 0.3 * torch.randn(count, 1, side, side, generator=g)
        for picture, label in zip(self.pictures, self.labels.tolist()):
            at = int(torch.randint(side - 10, (), generator=g))
            if label == 1:
                picture[0, range(at, at + 9), range(at, at + 9)] += 4
            elif label == 2:
                picture[0, at : at + 3, at : at + 3] -= 4
            elif label == 3:
                picture[0, at : at + 9, :9] += 1


class Run:
    def __init__(self, epochs=14, start=2):
        torch.manual_seed(0)
        surfaces = Surfaces(320)
        self.dataset = TensorDataset(surfaces.pictures, surfaces.labels)
        layers = conv(1, 16) + conv(16, 16) + conv(16, 24, 2) + conv(24, 24)
        self.net = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(24, 4))
        self.averaged = AveragedModel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.schedule = SWALR(self.optimizer, swa_lr=0.02, anneal_epochs=3)
        self.epochs, self.start = epochs, start

    def epoch(self, loader):
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(self.net(pictures), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def fit(self):
        loader = DataLoader(self.dataset, batch_size=32, shuffle=True)
        plain = DataLoader(self.dataset, batch_size=32)
        for epoch in range(self.epochs):
            loss = self.epoch(loader)
            if epoch < self.start:
                continue
            self.averaged.update_parameters(self.net)
            self.schedule.step()
            update_bn(plain, self.averaged)
            print(f"epoch {epoch}: loss {loss:.3f}, rate {self.schedule.get_last_lr()[0]:.3f}")


Run().fit()
