"""Small training by one process or by N ranks, to compare the parameters after a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_systems.config import ModelConfig
from cs_systems.model import BasicTransformerLM
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import counting

VOCABULARY = 24
STEPS = 3  # without, with and with some rows of `rare`; the optimizer is saved and loaded before the last
CONFIG = ModelConfig("test", d_model=24, d_ff=24, num_layers=2, num_heads=6, vocab_size=VOCABULARY, context_length=8)


@dataclass(frozen=True)
class Case:
    """Variant of the training.

    precision: fp32, bf16, or mixed, which is bf16 with the norms in fp32. micro_batches: number in each rank's rows.
    finishes_each: average gradients after each micro-batch, not only after the last.
    """

    precision: str = "fp32"
    micro_batches: int = 1
    finishes_each: bool = False

    def __str__(self) -> str:
        return f"{self.precision}-{self.micro_batches}{'-each' * self.finishes_each}"


class Model(nn.Module):
    """Language model with tied embeddings, a frozen norm, `rare`, used by some rows only, and the unused `never`."""

    def __init__(self, precision: str = "fp32", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.never = nn.Linear(3, 3)
        self.lm = BasicTransformerLM(CONFIG)
        self.lm.lm_head.weight = self.lm.token_embeddings.weight
        self.lm.layers[0].ln1.weight.requires_grad_(False)  # type: ignore[union-attr]
        self.rare = nn.Linear(VOCABULARY, VOCABULARY)
        self.register_buffer("temperature", torch.tensor([1.0 + seed]))
        if precision != "fp32":
            self.bfloat16()
        if precision == "mixed":
            for module in self.modules():
                if type(module).__name__ == "RMSNorm":
                    module.float()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.lm(tokens)
        rows = tokens[:, 0] == 0  # rows that begin with token 0 pass through `rare`
        if rows.any():
            logits = logits + rows[:, None, None] * self.rare(logits)
        return (logits / self.temperature).float()


def batch(step: int, rows: int) -> Tensor:
    """Return (rows, 9) token IDs; token 0 begins no row in step 0, every row in step 1, later only the first."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (rows, 9), generator=generator)
    if step == 1:
        tokens[:, 0] = 0
    if step > 1:
        tokens[0, 0] = 0
    return tokens


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay, and the rest, frozen ones too, with another learning rate."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


OPTIMIZER = torch.optim.AdamW
# With this eps a step is a smooth function of the gradient: rounding errors of tiny gradients do not flip its sign.
OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}


def nothing(model: nn.Module) -> None:
    """Finish no gradients: one process has none to average."""


def backward(model: nn.Module, tokens: Tensor, case: Case, finish: Callable[[nn.Module], None] = nothing) -> None:
    """Compute the gradients of the mean loss over micro-batches.

    They are finished after each micro-batch but the last if the case says so, otherwise synchronised with the last.
    """
    parts = tokens.chunk(case.micro_batches)
    for i, part in enumerate(parts):
        if i and case.finishes_each:
            finish(model)
        syncs = case.finishes_each or i == len(parts) - 1
        with nullcontext() if syncs or not hasattr(model, "no_sync") else model.no_sync():
            logits = model(part[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / len(parts)).backward()


ROWS = 4  # in the whole batch, for each rank


def rows_of(part: int, parts: int, world_size: int, step: int) -> Tensor:
    return batch(step, ROWS * world_size).chunk(parts)[part]


def gathered(optimizer: Any) -> dict[str, Any]:
    """Return the state of one process, on every rank; torch's own optimizer gathers it on one rank, on request."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer.state_dict()  # type: ignore[no-any-return]
    optimizer.consolidate_state_dict(to=0)
    states = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states, 0)
    return states[0]  # type: ignore[return-value]


def train_rank(
    strategy: ParallelStrategy, case: Case, rank: int, world_size: int, device: str = "cpu"
) -> dict[str, Any]:
    """Train one rank from its own parameters; save and load the optimizer before the last step.

    Return tensors, the optimizer's state, and the collectives of the last step, during backward and in all.
    """
    part, parts = strategy.part_of_batch(rank, world_size)
    model = strategy.wrap(Model(case.precision, seed=rank).to(device))
    optimizer = strategy.make_optimizer(groups(model), OPTIMIZER, **OPTIONS)
    for step in range(STEPS):
        if step == STEPS - 1:
            saved = gathered(optimizer)
            optimizer = strategy.make_optimizer(groups(model), OPTIMIZER, lr=0.5)  # the loaded state must replace this
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        with counting() as calls:
            backward(model, rows_of(part, parts, world_size, step).to(device), case, strategy.finish_gradients)
            during_backward = len(calls)
            strategy.finish_gradients(model)
            optimizer.step()
    return {
        "tensors": dict(tensors(model)),
        "state": gathered(optimizer),
        "during_backward": during_backward,
        "calls": calls,
    }


def train_scaled(strategy: ParallelStrategy, rank: int, world_size: int, fused: bool) -> dict[str, Any]:
    """Take two steps with a gradient scaler, where the first overflows on the last rank only, and one step without.

    fused: the optimizer checks for overflow and unscales in its own kernel.
    """
    part, parts = strategy.part_of_batch(rank, world_size)
    rows = rows_of(part, parts, world_size, 1)
    found: dict[str, Any] = {"scales": []}
    for scaled in (True, False):
        model = strategy.wrap(Model())
        optimizer = strategy.make_optimizer(groups(model), OPTIMIZER, **OPTIONS, fused=fused)
        scaler = strategy.grad_scaler("cpu", enabled=scaled)
        found["before"] = dict(tensors(model))
        for overflows in (True, False) if scaled else (False,):
            optimizer.zero_grad()
            overflows_here = overflows and rank == world_size - 1
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            scaler.scale(loss * (torch.inf if overflows_here and not has_parts(strategy) else 1.0)).backward()
            strategy.finish_gradients(model)
            if overflows_here and has_parts(strategy):
                overflow(optimizer)
            scaler.step(optimizer)
            scaler.update()
            found["skipped" if overflows else "scaled" if scaled else "plain"] = dict(tensors(model))
            found["scales"].append(scaler.get_scale())
    return found


def has_parts(strategy: ParallelStrategy) -> bool:
    """Return whether a rank has gradients that no other has; otherwise an overflow on one reaches the mean of all."""
    return bool({"gradients", "parameters", "features"} & strategy.splits)


def overflow(optimizer: Any) -> None:
    """Make one element of this rank's gradients infinite."""
    found = (p.grad for group in getattr(optimizer, "of_parts", optimizer).param_groups for p in group["params"])
    grads = (getattr(grad, "_local_tensor", grad) for grad in found if grad is not None)
    next(grad for grad in grads if grad.numel()).view(-1)[0] = torch.inf


def train_whole(case: Case, world_size: int) -> tuple[Model, torch.optim.Optimizer]:
    """Train one process with the whole batch at once."""
    model = Model(case.precision)
    optimizer = OPTIMIZER(groups(model), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, batch(step, ROWS * world_size), Case(case.precision))
        optimizer.step()
    return model, optimizer


def train_in_parts(case: Case, world_size: int) -> tuple[Model, torch.optim.Optimizer]:
    """Train one process that averages over the ranks' rows in turn, with exactly the arithmetic of two ranks."""
    model = Model(case.precision)
    optimizer = OPTIMIZER(groups(model), **OPTIONS)
    for step in range(STEPS):
        means: dict[nn.Parameter, Tensor] = {}
        for rank in range(world_size):
            optimizer.zero_grad()
            backward(model, rows_of(rank, world_size, world_size, step), case)
            for p in model.parameters():
                if p.grad is not None:
                    part = p.grad / world_size
                    means[p] = means[p] + part if p in means else part
        for p in model.parameters():
            p.grad = means.get(p)
        optimizer.step()
    return model, optimizer


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by their names without a wrapper."""
    inner = getattr(model, "module", model)
    return ((name, x.detach().cpu().clone()) for name, x in inner.state_dict().items())
