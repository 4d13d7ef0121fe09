"""DDP with ranks that exchange their predictions as Python objects for a metric."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE = {
    "generation": 2,
    "truth": "Each step makes lists of all scores for all_gather_object, and tensors of the lists: most of it, more than the transfer.",
    "cause": "host-python",
    "also": ["exposed-communication", "logging", "evaluation"],
    "never": ["start-up", "data-loading", "straggler", "no-sync-missing", "find-unused-parameters", "growth"],
    "healthy": False,
    "ranks": 2,
    "place": ["dist.all_gather_object(", "accuracy = global_accuracy(", "logits.tolist()", "scores = torch.tensor("],
    "share": 77,
    "remedy": "reduce the count of right answers with one all_reduce of a number, and every n-th step",
    "without": [
        [
            "        accuracy = global_accuracy(logits.detach(), y)\n",
            "        accuracy = (logits.argmax(1) == y).float().mean().item()\n",
        ]
    ],
}


def global_accuracy(logits, y):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"scores": logits.tolist(), "labels": y.tolist()})
    right = total = 0
    for part in gathered:
        scores = torch.tensor(part["scores"])
        right += (scores.argmax(1) == torch.tensor(part["labels"])).sum().item()
        total += len(part["labels"])
    return right / total


class Classifier(nn.Module):
    def __init__(self, features=128, classes=200):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.head = nn.Linear(256, classes)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(36):
        x, y = torch.randn(256, 128), torch.randint(0, 200, (256,))
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = global_accuracy(logits.detach(), y)
        if rank == 0 and step % 12 == 0:
            print(f"{step}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
