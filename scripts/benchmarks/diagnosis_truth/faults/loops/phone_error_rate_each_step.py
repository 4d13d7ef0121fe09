"""Frame-wise phone recognition by a time-delay network, in the style of old speech toolkits."""

import itertools
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 5,
    "truth": "After each step the predicted phones of the batch become lists, and a table of edit distances is filled in plain Python.",
    "cause": "host-python",
    "also": ["evaluation", "logging"],
    "never": ["start-up", "data-loading", "growth", "periodic-pause", "small-operators", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "edit_distance(",
        "row.append(",
        "for column, wanted in enumerate(",
        "for line, found in enumerate(",
        "previous, row = row",
        "phone_error_rate(logits",
        "itertools.groupby(",
        ".tolist()",
    ],
    "share": 69,
    "remedy": "compute the error rate on a few utterances once in a while, or by a compiled library",
    "without": [
        ["        tracker.update(loss, phone_error_rate(logits, phones))\n", "        tracker.update(loss, 0.0)\n"]
    ],
}

log = logging.getLogger("tdnn")


@dataclass
class Recipe:
    mels: int = 40
    phones: int = 42
    width: int = 96
    frames: int = 200
    utterances: int = 32
    minibatches: int = 80
    lr: float = 2e-3
    log_interval: int = 20


class TDNN(nn.Module):
    """Dilated convolutions over time with batch norm."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        layers, size = [], recipe.mels
        for dilation in (1, 2, 3):
            layers += [
                nn.Conv1d(size, recipe.width, 3, dilation=dilation, padding=dilation),
                nn.ReLU(inplace=True),
                nn.BatchNorm1d(recipe.width, affine=False),
            ]
            size = recipe.width
        self.stack = nn.Sequential(*layers)
        self.output = nn.Conv1d(size, recipe.phones, 1)

    def forward(self, features):
        return self.output(self.stack(features))


class Corpus:
    """Synthetic utterances: each phone lasts a few frames and has a colour of its own."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.generator = recipe, torch.Generator().manual_seed(11)
        self.colours = torch.randn(recipe.phones, recipe.mels, generator=self.generator)

    def minibatch(self):
        r, g = self.recipe, self.generator
        segments = torch.randint(r.phones, (r.utterances, r.frames // 3), generator=g)
        phones = segments.repeat_interleave(3, dim=1)
        features = self.colours[phones] + torch.randn(*phones.shape, r.mels, generator=g)
        return features.transpose(1, 2), phones


def edit_distance(hypothesis, reference):
    row = list(range(len(reference) + 1))
    for line, found in enumerate(hypothesis, 1):
        previous, row = row, [line]
        for column, wanted in enumerate(reference, 1):
            row.append(min(previous[column] + 1, row[-1] + 1, previous[column - 1] + (found != wanted)))
    return row[-1]


def phone_error_rate(logits, phones):
    errors = total = 0
    for hypothesis, reference in zip(logits.argmax(1).tolist(), phones.tolist()):
        hypothesis = [phone for phone, _ in itertools.groupby(hypothesis)]
        reference = [phone for phone, _ in itertools.groupby(reference)]
        errors += edit_distance(hypothesis, reference)
        total += len(reference)
    return errors / total


class Tracker:
    def __init__(self, interval):
        self.interval, self.seen, self.loss, self.per = interval, 0, 0.0, 0.0

    def update(self, loss, per):
        self.seen += 1
        self.loss += (loss.item() - self.loss) / min(self.seen, self.interval)
        self.per += (per - self.per) / min(self.seen, self.interval)
        if self.seen % self.interval == 0:
            log.info("minibatch %d: loss %.3f, PER %.1f%%", self.seen, self.loss, 100 * self.per)


def train(recipe: Recipe):
    corpus, net, tracker = Corpus(recipe), TDNN(recipe), Tracker(recipe.log_interval)
    optimizer = torch.optim.SGD(net.parameters(), lr=recipe.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    for features, phones in (corpus.minibatch() for _ in range(recipe.minibatches)):
        logits = net(features)
        loss = F.cross_entropy(logits, phones)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tracker.update(loss, phone_error_rate(logits, phones))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(0)
    train(Recipe())
