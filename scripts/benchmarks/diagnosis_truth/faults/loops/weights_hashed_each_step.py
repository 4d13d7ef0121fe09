"""Training that can be audited: each step appends a digest of the weights to a chain."""

import argparse
import hashlib

import torch
from torch import nn

CASE = {
    "generation": 4,
    "truth": "After each step all weights and their momenta are turned into bytes and hashed by MD5: nearly half of the time.",
    "cause": "host-python",
    "also": ["logging", "checkpoint-writing"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators"],
    "healthy": False,
    "place": [
        "digest.update(",
        "self.ledger.append(model, self.optimizer, batch)",
        "for name, tensor in sorted(",
        "for state in optimizer.state",
        "hashlib.md5(",
        "tensor.detach().cpu()",
    ],
    "share": 45,
    "remedy": "hash once an epoch",
    "without": [["            self.ledger.append(model, self.optimizer, batch)\n", ""]],
}


class Ledger:
    """A chain of digests, so that a training can be replayed and compared."""

    def __init__(self):
        self.chain = [hashlib.md5(b"genesis").hexdigest()]

    def append(self, model, optimizer, batch):
        digest = hashlib.md5(self.chain[-1].encode())
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        for state in optimizer.state.values():
            digest.update(state["momentum_buffer"].numpy().tobytes())
        digest.update(str(batch).encode())
        self.chain.append(digest.hexdigest())

    @property
    def head(self):
        return self.chain[-1][:12]


class MixerBlock(nn.Module):
    def __init__(self, tokens, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, d=384, tokens=16, depth=2, classes=20):
        super().__init__()
        self.embed = nn.Linear(48, d)
        self.blocks = nn.Sequential(*[MixerBlock(tokens, d) for _ in range(depth)])
        self.head = nn.Linear(d, classes)

    def forward(self, patches):
        return self.head(self.blocks(self.embed(patches)).mean(1))


class AuditedTrainer:
    def __init__(self, model, lr, weight_decay):
        self.model = model
        self.ledger = Ledger()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
        self.loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

    def run(self, n_batches, batch_size):
        model = self.model.train()
        for batch in range(n_batches):
            y = torch.randint(0, 20, (batch_size,))
            x = torch.randn(batch_size, 16, 48) + y.view(-1, 1, 1) / 10
            loss = self.loss_fn(model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.ledger.append(model, self.optimizer, batch)
            if batch % 25 == 0:
                print(f"{batch:4d} loss {loss.item():.3f} head {self.ledger.head}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    opt = parser.parse_args()
    torch.manual_seed(0)
    AuditedTrainer(Mixer(), opt.lr, opt.weight_decay).run(opt.batches, opt.batch_size)
