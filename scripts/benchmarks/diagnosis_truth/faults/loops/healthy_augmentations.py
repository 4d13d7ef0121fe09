"""A classifier of images with augmentations of whole batches, label smoothing and an average of its weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 2,
    "truth": "Augmentations work on whole batches and take a few percent, as does the average; convolutions take the step.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "host-python", "small-operators", "layout-conversion", "evaluation"],
    "healthy": True,
}


class Bottleneck(nn.Module):
    def __init__(self, n_in, n_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
        self.down = nn.Conv2d(n_in, n_out, 1, stride) if stride > 1 or n_in != n_out else nn.Identity()

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class ResNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.body = nn.Sequential(Bottleneck(3, 32), Bottleneck(32, 64, 2), Bottleneck(64, 96, 2))
        self.fc = nn.Linear(96, classes)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


def random_crop(x, pad=4):
    n, _, h, w = x.shape
    padded = F.pad(x, (pad, pad, pad, pad))
    dy, dx = torch.randint(0, 2 * pad + 1, (2, n))
    rows = (dy[:, None] + torch.arange(h))[:, None, :, None]
    columns = (dx[:, None] + torch.arange(w))[:, None, None, :]
    return padded[torch.arange(n)[:, None, None, None], torch.arange(3)[None, :, None, None], rows, columns]


def augment(x):
    flip = torch.rand(len(x), 1, 1, 1) < 0.5
    return random_crop(torch.where(flip, x.flip(-1), x))


def mixup(x, y, classes=10, alpha=0.2):
    lam = torch.distributions.Beta(alpha, alpha).sample()
    order = torch.randperm(len(x))
    target = F.one_hot(y, classes).float()
    return lam * x + (1 - lam) * x[order], lam * target + (1 - lam) * target[order]


def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(16 * 32, 3, 32, 32), torch.randint(0, 10, (16 * 32,)))
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    net = ResNet()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for x, y in loader:
        x, target = mixup(augment(x), y)
        loss = F.cross_entropy(net(x), target, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
