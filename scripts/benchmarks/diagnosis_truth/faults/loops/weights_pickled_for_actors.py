"""A learner of imitation, which sends its weights to actors through a hook after each batch."""

import pickle
import zlib

import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "A hook pickles and compresses all weights after each batch, for actors that read them once in a while: most of the loop.",
    "cause": "host-python",
    "also": ["checkpoint-writing"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": ["zlib.compress(", "pickle.dumps(", "p.numpy()", "hook.on_train_batch_end("],
    "share": 53,
    "remedy": "send the weights every hundredth batch, and uncompressed",
    "without": [["        self.message = zlib.compress(pickle.dumps(weights), 1)\n", ""]],
}


class Hook:
    def on_train_start(self, learner):
        pass

    def on_train_batch_end(self, learner, loss, index):
        pass


class PublishWeights(Hook):
    def __init__(self):
        self.message = b""

    def on_train_batch_end(self, learner, loss, index):
        weights = {name: p.numpy() for name, p in learner.module.state_dict().items()}
        self.message = zlib.compress(pickle.dumps(weights), 1)


class PrintLoss(Hook):
    def __init__(self, every):
        self.every = every

    def on_train_batch_end(self, learner, loss, index):
        if index % self.every == 0:
            print(f"batch {index}: {loss.item():.4f}")


class Policy(nn.Module):
    def __init__(self, n_obs=48, n_act=12):
        super().__init__()
        self.body = nn.GRU(n_obs, 128, batch_first=True)
        self.head = nn.Sequential(nn.Linear(128, 256), nn.ELU(), nn.Linear(256, n_act))

    def forward(self, obs):
        return self.head(self.body(obs)[0])


class Learner:
    def __init__(self, module, hooks):
        self.module, self.hooks = module, hooks

    def configure_optimizers(self):
        return torch.optim.Adam(self.module.parameters(), lr=1e-3)

    def training_step(self, batch):
        obs, action = batch
        return nn.functional.cross_entropy(self.module(obs).flatten(0, 1), action.flatten())

    def fit(self, batches):
        optimizer = self.configure_optimizers()
        for hook in self.hooks:
            hook.on_train_start(self)
        for index, batch in enumerate(batches):
            loss = self.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for hook in self.hooks:
                hook.on_train_batch_end(self, loss, index)


def demonstrations(count, batch=24, steps=16):
    for _ in range(count):
        obs = torch.randn(batch, steps, 48)
        yield obs, obs[..., :12].argmax(-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    Learner(Policy(), [PublishWeights(), PrintLoss(20)]).fit(demonstrations(80))
