"""Bird or plane? A module and a trainer in the style of a well-known framework, with callbacks and an average of weights."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 13,
    "truth": "Callbacks run in each step: an average of the weights by one fused call, and a dictionary of the last numbers. Both are little, the validation of two batches after each epoch too; convolutions take the time.",
    "cause": None,
    "also": [],
    "never": ["logging", "evaluation", "data-loading", "host-python", "checkpoint-writing", "duplicate-forward"],
    "healthy": True,
}


class Callback:
    def on_fit_start(self, trainer, module):
        pass

    def on_train_batch_end(self, trainer, module):
        pass

    def on_epoch_end(self, trainer, module):
        pass


class WeightAverage(Callback):
    def __init__(self, decay=0.99):
        self.decay = decay

    def on_fit_start(self, trainer, module):
        self.average = copy.deepcopy(module).requires_grad_(False)
        self.kept, self.living = list(self.average.parameters()), list(module.parameters())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module):
        torch._foreach_lerp_(self.kept, self.living, 1 - self.decay)


class Printer(Callback):
    def on_epoch_end(self, trainer, module):
        print(f"epoch {trainer.epoch}:", {name: round(float(value), 3) for name, value in trainer.logged.items()})


class LitClassifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 2),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.05)
        self.log("train_loss", loss)
        self.log("train_acc", (logits.argmax(1) == y).float().mean())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=self.trainer.steps)

    def log(self, name, value):
        self.trainer.logged[name] = value.detach()


class Trainer:
    def __init__(self, max_epochs, callbacks):
        self.max_epochs, self.callbacks, self.logged = max_epochs, callbacks, {}

    def call(self, hook, module):
        for callback in self.callbacks:
            getattr(callback, hook)(self, module)

    def fit(self, module, train_loader, val_loader):
        module.trainer, self.steps = self, self.max_epochs * len(train_loader)
        optimizer, scheduler = module.configure_optimizers()
        self.call("on_fit_start", module)
        for self.epoch in range(self.max_epochs):
            module.train()
            for batch_idx, batch in enumerate(train_loader):
                loss = module.training_step(batch, batch_idx)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                self.call("on_train_batch_end", module)
            module.eval()
            with torch.no_grad():
                for batch_idx, batch in enumerate(val_loader):
                    module.validation_step(batch, batch_idx)
            self.call("on_epoch_end", module)


def pictures(count):
    y = torch.randint(2, (count,))
    x = torch.randn(count, 3, 32, 32)
    x[y == 1, :, 12:20] += 0.5
    x[y == 0, :, :, 12:20] += 0.5
    return TensorDataset(x, y)


if __name__ == "__main__":
    torch.manual_seed(17)
    train = DataLoader(pictures(1920), batch_size=64, shuffle=True)
    validation = DataLoader(pictures(128), batch_size=64)
    Trainer(4, [WeightAverage(), Printer()]).fit(LitClassifier(), train, validation)
