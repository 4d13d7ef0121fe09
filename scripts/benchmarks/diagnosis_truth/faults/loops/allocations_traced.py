"""A recommender of baskets; a helper from the search for a memory leak still runs."""

import random
import tracemalloc

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "tracemalloc is still on, with 12 frames each: every object that the sampling of batches makes is traced.",
    "cause": "own-profiler",
    "also": ["host-python", "logging", "data-loading"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators"],
    "healthy": False,
    "place": [
        "tracemalloc.start(",
        "tracemalloc.get_traced_memory()",
        "self.monitor.check(",
        "MemoryMonitor(TRACE_MEMORY)",
    ],
    "share": 83,
    "remedy": "do not start tracemalloc outside a search for a leak",
    "without": [["TRACE_MEMORY = True", "TRACE_MEMORY = False"]],
}

TRACE_MEMORY = True


class MemoryMonitor:
    def __init__(self, enabled, limit_mib=256):
        self.enabled, self.limit, self.last = enabled, limit_mib * 2**20, None
        if enabled:
            tracemalloc.start(12)

    def check(self, where):
        if not self.enabled:
            return
        current, peak = tracemalloc.get_traced_memory()
        if self.last is not None and current - self.last > self.limit:
            print(f"memory grows at {where}: {current / 2**20:.1f} MiB, at most {peak / 2**20:.1f}")
        self.last = current


class Baskets:
    """Baskets of items, which customers repeat with small changes."""

    def __init__(self, n_customers=800, n_items=400, seed=0):
        rng = random.Random(seed)
        self.rng, self.n_items = rng, n_items
        self.popularity = [rng.random() for _ in range(n_items)]
        self.history = {c: [rng.randrange(1, n_items) for _ in range(rng.randint(30, 60))] for c in range(n_customers)}

    def sample(self, size, length=12):
        rows, targets = [], []
        for customer in self.rng.sample(range(len(self.history)), size):
            items = self.history[customer]
            cut = self.rng.randrange(2, len(items))
            weights = {item: 1.0 / (1.0 + age) + self.popularity[item] for age, item in enumerate(items[:cut])}
            kept = [item for item in items[:cut] if weights[item] > self.rng.random() * 0.1]
            rows.append(([0] * length + kept)[-length:])
            targets.append(items[cut])
        return torch.tensor(rows), torch.tensor(targets)


class SessionModel(nn.Module):
    def __init__(self, n_items, d=32):
        super().__init__()
        self.items = nn.Embedding(n_items, d, padding_idx=0)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h, _ = self.gru(self.drop(self.items(x)))
        return h[:, -1] @ self.items.weight.T


class Runner:
    def __init__(self):
        torch.manual_seed(0)
        self.data = Baskets()
        self.model = SessionModel(self.data.n_items)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.monitor = MemoryMonitor(TRACE_MEMORY)

    def train_step(self, step):
        x, y = self.data.sample(48)
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.monitor.check(f"step {step}")
        return loss.item()

    def run(self, steps=60):
        mean = None
        for step in range(steps):
            value = self.train_step(step)
            mean = value if mean is None else 0.95 * mean + 0.05 * value
            if step % 20 == 19:
                print(f"{step + 1}/{steps} loss {mean:.3f}")


if __name__ == "__main__":
    Runner().run()
