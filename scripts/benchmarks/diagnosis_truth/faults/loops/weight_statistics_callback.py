"""A small trainer with callbacks, one of which writes statistics of all weights."""

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

CASE = {
    "generation": 2,
    "truth": "A callback computes quantiles and norms of each weight after every step and writes them: two thirds of the time.",
    "cause": "logging",
    "also": ["host-python", "small-operators"],
    "never": ["start-up", "data-loading", "evaluation", "checkpoint-writing", "growth"],
    "healthy": False,
    "place": [
        "torch.quantile(flat",
        "flat.norm()",
        "handler.on_step_end(",
        "self.file.flush()",
        "flat = p.detach()",
        "flat.sort()",
    ],
    "share": 69,
    "remedy": "write the statistics every hundredth step, or of fewer weights",
    "without": [["WeightWatcher(folder), ", ""]],
}


class Callback:
    def on_train_begin(self, trainer): ...
    def on_step_end(self, trainer): ...
    def on_train_end(self, trainer): ...


class WeightWatcher(Callback):
    def __init__(self, folder):
        self.file = (Path(folder) / "weights.tsv").open("w")

    def on_step_end(self, trainer):
        for name, p in trainer.model.named_parameters():
            flat = p.detach().flatten().sort().values
            low, median, high = torch.quantile(flat[: 1 << 20], torch.tensor([0.01, 0.5, 0.99]))
            numbers = (flat.norm(), flat.mean(), flat.std(), low, median, high)
            self.file.write("\t".join([str(trainer.step), name, *(f"{n.item():.6g}" for n in numbers)]) + "\n")
        self.file.flush()

    def on_train_end(self, trainer):
        self.file.close()


class EarlyStop(Callback):
    def on_train_begin(self, trainer):
        self.best = math.inf

    def on_step_end(self, trainer):
        self.best = min(self.best, trainer.loss)


class Trainer:
    def __init__(self, model, data, callbacks, steps):
        self.model, self.data, self.callbacks, self.steps = model, data, callbacks, steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.step, self.loss = 0, math.nan

    def call(self, event):
        for handler in self.callbacks:
            if event == "on_step_end":
                handler.on_step_end(self)
            else:
                getattr(handler, event)(self)

    def training_step(self, batch):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self):
        self.call("on_train_begin")
        for self.step in range(1, self.steps + 1):
            self.loss = self.training_step(next(self.data))
            self.call("on_step_end")
        self.call("on_train_end")


def batches(size):
    while True:
        x = torch.randn(size, 192)
        yield x, x.cumsum(-1).tanh()


if __name__ == "__main__":
    torch.manual_seed(42)
    net = nn.Sequential(nn.Linear(192, 384), nn.SiLU(), nn.Linear(384, 384), nn.SiLU(), nn.Linear(384, 192))
    with tempfile.TemporaryDirectory() as folder:
        Trainer(net, batches(512), [WeightWatcher(folder), EarlyStop()], 40).train()
