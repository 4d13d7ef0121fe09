"""Training loops under torch.compile that print its compilations: `compiled.py BACKEND LOOP`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

STEPS = 10


class Blocks(nn.Module):
    """Two blocks, one of them under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(x + self.blocks[1](x))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks()
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def batch(step: int) -> Tensor:
    return torch.randn(4 if step < 5 else 6 if step < 7 else 7, 8)


def shapes_and_evaluation(backend: str) -> None:
    model, optimizer = model_and_optimizer()
    compiled = torch.compile(model, backend=backend)
    for step in range(STEPS):
        if step % 4 == 3:
            compiled.eval()
            with torch.no_grad():
                compiled(batch(step))
            compiled.train()
        loss = compiled(batch(step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def model_that_compiles_itself(backend: str) -> None:
    model, optimizer = model_and_optimizer()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        model.zero_grad()


def whole_step(backend: str) -> None:
    """Compile a whole step as one function, with code that breaks its graph."""
    model, optimizer = model_and_optimizer()

    @torch.compile(backend=backend)
    def train(x: Tensor) -> float:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        return loss.item()

    for step in range(STEPS):
        train(batch(step))


def compiled_again(backend: str) -> None:
    """Reset the compiler in the middle of the loop."""
    model, optimizer = model_and_optimizer()
    loss_of = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    for step in range(STEPS):
        if step in (4, 7):
            torch._dynamo.reset()
        loss_of(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: tuple[Callable[[str], None], ...] = (
    shapes_and_evaluation, model_that_compiles_itself, whole_step, compiled_again,
)  # fmt: skip
SLOW = (shapes_and_evaluation, whole_step, compiled_again)  # these compile many functions


def report(name: str) -> None:
    """Print torch.compile's counters for one loop, and the functions of torch that are replaced."""
    found = {group: dict(counters[group]) for group in ("frames", "graph_break", "unimplemented", "stats", "recompile")}
    print(name, {group: sorted(counts.items()) for group, counts in found.items()})
    counters.clear()


if __name__ == "__main__":
    for loop in LOOPS:
        if loop.__name__ in sys.argv[2:]:
            torch.manual_seed(0)
            loop(sys.argv[1])
            report(loop.__name__)
    print(nn.Module.__call__.__qualname__, torch.autograd._engine_run_backward.__qualname__)
