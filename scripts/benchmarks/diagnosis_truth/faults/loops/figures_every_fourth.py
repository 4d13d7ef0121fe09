"""A figure of the loss is drawn and saved after every fourth step."""

import tempfile

import matplotlib
import torch
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

CASE = {
    "truth": "Drawing and saving a figure with matplotlib in every fourth step takes nearly all of the time.",
    "cause": "logging",
    "also": ["periodic-pause", "host-python"],
    "never": ["start-up", "data-loading", "evaluation", "growth"],
    "healthy": False,
}


def plot(losses, folder):
    fig, ax = plt.subplots()
    ax.plot(losses)
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    fig.savefig(folder + "/loss.png")
    plt.close(fig)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
losses = []
with tempfile.TemporaryDirectory() as folder:
    for step in range(40):
        x = torch.randn(256, 20)
        loss = (net(x) - x.sum(1, keepdim=True)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 3:
            plot(losses, folder)
