"""Misuses of strategies, with their error messages, and steps after a failed backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_systems.config import PRESETS
from cs_systems.model import BasicTransformerLM
from cs_systems.model.parallel import compose
from cs_systems.model.parallel._data_parallel import check_same_parameters
from cs_systems.model.parallel.zero1 import ShardedOptimizer

STRATEGIES = ("ddp_naive", "ddp_flat", "ddp_overlap", "ddp_bucketed", "zero1_flat", "fsdp", "tp")


def message(work: Callable[[], Any]) -> str:
    """Return the message of the error that `work` raises; empty if it raises none."""
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def mismatches(rank: int, world_size: int) -> dict[str, str]:
    """Return this rank's error messages where the last rank has a different model."""
    last = rank == world_size - 1
    models: dict[str, Callable[[], nn.Module]] = {
        "shape": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5 if last else 4)),
        "count": lambda: nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2)] * (not last)),
        "order": lambda: nn.ModuleDict({k: nn.Linear(2, 2) for k in ("ba" if last else "ab")}),
        "dtype": lambda: nn.Linear(2, 2).to(torch.bfloat16 if last else torch.float32),
        "frozen": lambda: nn.Linear(2, 2).requires_grad_(not last),
    }
    group = dist.new_group(range(1, world_size))
    found = {kind: message(lambda build=build: compose("ddp_flat").wrap(build())) for kind, build in models.items()}
    in_group = message(lambda: check_same_parameters(nn.Linear(2, 2 + last), group)) if rank else ""
    return {**found, "group": in_group}


def misuses(rank: int, world_size: int) -> dict[str, str]:
    """Return the error messages of misuses of strategies and their optimizers."""

    def backward_twice() -> None:
        model: Any = compose("ddp_overlap").wrap(nn.Linear(2, 2))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    def unfreeze() -> None:
        model: Any = compose("ddp_flat").wrap(nn.Linear(2, 2).requires_grad_(False))
        model.module.weight.requires_grad_(True)
        model.finish_gradient_synchronization()

    def load_another() -> None:
        params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        state = torch.optim.SGD(params[:2], lr=0.1).state_dict()
        ShardedOptimizer(params, torch.optim.SGD, lr=0.1).load_state_dict(state)

    def step_unwrapped() -> None:
        compose("zero1_flat").make_optimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)

    return {
        "single": message(lambda: compose("single").wrap(nn.Linear(2, 2))),
        "backward twice": message(backward_twice),
        "unfrozen": message(unfreeze),
        "another state": message(load_another),
        "not wrapped": message(step_unwrapped),
        "no bucket": message(lambda: compose("ddp_bucketed", bucket_size_mb=0).wrap(nn.Linear(2, 2))),
        "no last bucket": message(lambda: compose("ddp_bucketed", last_bucket_mb=0).wrap(nn.Linear(2, 2))),
        "no such dtype": message(lambda: compose("ddp_bucketed", comm_dtype="fp8").wrap(nn.Linear(2, 2))),
        "complex": message(
            lambda: compose("ddp_bucketed", comm_dtype="bf16").wrap(nn.Linear(2, 2, dtype=torch.cfloat))
        ),
        "not NCCL": message(lambda: compose("ddp_overlap", max_ctas=8).wrap(nn.Linear(2, 2))),
    }


def assigned(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors of load_state_dict(assign=True), on the wrapped model and on a module inside it."""
    found = {}
    for name in STRATEGIES:
        model = compose(name).wrap(BasicTransformerLM(PRESETS["tiny"]))
        for m in (model, next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]):
            before = [*model.parameters()]
            found[f"{name} {type(m).__name__}"] = message(lambda m=m: m.load_state_dict(m.state_dict(), assign=True))
            assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    return found


class _FailsBelowZero(torch.autograd.Function):
    """Identity with a backward that fails if an input was negative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.fails = bool((x < 0).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.fails:
            raise RuntimeError("planted failure")
        return gradient


class FailingModel(nn.Module):
    """Two layers of positive weights; backward fails between them where the input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        for p in self.parameters():
            nn.init.ones_(p)

    def forward(self, x: Tensor) -> Any:
        return self.last(_FailsBelowZero.apply(self.first(x)))


def after_a_failed_backward(rank: int, world_size: int) -> dict[str, tuple[list[str], list[Tensor], list[Tensor]]]:
    """Return by strategy the errors of each backward, and the parameters with and without a failure before."""
    found = {}
    for name in ("ddp_overlap", "ddp_bucketed", "zero1_flat"):
        strategy, x = compose(name), torch.full((1, 2), rank + 1.0)
        trained, errors = [], []
        for inputs in ([-x, x], []):
            model: Any = strategy.wrap(FailingModel())
            optimizer = strategy.make_optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            errors += [message(lambda m=model, x=x: m(x).sum().backward()) for x in inputs]
            if inputs:
                model.finish_gradient_synchronization()
            optimizer.zero_grad()
            model(x).sum().backward()
            strategy.finish_gradients(model)
            optimizer.step()
            trained.append([p.detach().clone() for p in model.parameters()])
        found[name] = (errors, *trained)
    return found


MISUSES = [mismatches, misuses, assigned, after_a_failed_backward]
