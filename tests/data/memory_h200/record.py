"""Write the memory snapshots of this folder: python3 record.py FOLDER, on a GPU.

A transformer's feed-forward blocks are trained or evaluated with a fault of memory in each file; `no_grad` has none.
`process_limit` and `device_full` end with a request that failed. The first training step comes before recording.
"""

from __future__ import annotations

import contextlib
import gzip
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, VOCABULARY, BLOCKS, GIB = 1024, 8000, 8, 1 << 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: Model, tokens: Tensor, steps: int, optimizer: torch.optim.Optimizer, fault: str = "") -> list[Tensor]:
    kept = []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward(retain_graph=fault == "kept_graphs")
        if fault == "kept_graphs":
            kept.append(loss)
        if fault == "kept_outputs":
            kept.append(model(tokens).detach())
        optimizer.step()
        if fault != "kept_gradients":
            optimizer.zero_grad()
    return kept


def evaluate(model: Model, tokens: Tensor) -> None:
    for _ in range(4):
        out = model(tokens)
        out.argmax(-1).float().mean()


def record(fault: str, folder: Path) -> None:
    model, tokens = Model().cuda(), torch.randint(VOCABULARY, (8, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fault != "foreach", foreach=fault == "foreach")
    if fault not in ("evaluation", "no_grad"):
        train(model, tokens, 1, optimizer)
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    with contextlib.suppress(torch.OutOfMemoryError):
        if fault == "evaluation":
            evaluate(model, tokens)
        elif fault == "no_grad":
            with torch.no_grad():
                evaluate(model, tokens)
        elif fault == "process_limit":
            torch.cuda.set_per_process_memory_fraction(6 * GIB / torch.cuda.mem_get_info()[1])
            train(model, tokens.repeat(4, 1), 2, optimizer)
        elif fault == "device_full":
            _ = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(400)]
        else:
            rows = tokens[:1] if fault == "foreach" else tokens
            train(model, rows, 6 if fault in ("kept_graphs", "kept_outputs") else 4, optimizer, fault)
    path = folder / f"{fault}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.set_per_process_memory_fraction(1.0)
    (folder / f"{fault}.pickle.gz").write_bytes(gzip.compress(path.read_bytes()))


if __name__ == "__main__":
    for each in (
        *("evaluation", "no_grad", "kept_graphs", "kept_outputs", "foreach"),
        *("kept_gradients", "process_limit", "device_full"),
    ):
        record(each, Path(sys.argv[1]))
        torch.cuda.empty_cache()
