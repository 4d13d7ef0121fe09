"""What each rank does: every strategy × case and every scenario, one after the other, in processes started once."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cs_systems import plugins
from cs_systems.parallel import compose
from tests.parallel.training import Case, train_rank

COLLECTIVE_LIMIT_S = 20


def cases(name: str) -> list[Case]:
    """Compositions have fewer: their parts are tried alone too."""
    low = Case("bf16" if compose(name).one_dtype else "mixed", micro_batches=2)
    return [Case("fp32", micro_batches=2), low] if "+" in name else [Case("fp32"), Case("fp32", 2), Case("bf16"), low]


def strategies() -> list[str]:
    """Every strategy that averages gradients, alone and with each that leaves that to another."""
    parts = {name: plugins.get("parallel", name).splits for name in plugins.names("parallel")}
    alone = [name for name, splits in parts.items() if "batch" in splits]
    joined = [
        f"{first}+{second}"
        for second, splits in parts.items()
        if splits and "batch" not in splits
        for first in alone
        if not parts[first] & splits
    ]
    return alone + joined


def options(name: str) -> dict[str, Any]:
    """Several small buckets, of which some are ready in the midst of backward; and what unused parameters need."""
    strategy = compose(name)
    size = {"bucket_size_mb": 0.002} if "bucket_size_mb" in strategy.options else {}
    return {**size, **strategy.for_unused}


def attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception:
        return traceback.format_exc()


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
    )
    results: dict[str, Any] = {}
    for name in strategies():
        for case in cases(name):
            strategy = compose(name, **options(name))
            results[f"{name}-{case}"] = attempt(lambda s=strategy, c=case: train_rank(s, c, rank, world_size))
    for scenario in SCENARIOS:
        results[scenario.__name__] = attempt(lambda s=scenario: s(rank, world_size))
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def mismatches(rank: int, world_size: int) -> dict[str, str]:
    """What the last rank's other model is answered with, on this rank."""
    last = rank == world_size - 1
    models: dict[str, Callable[[], nn.Module]] = {
        "shape": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5 if last else 4)),
        "count": lambda: nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2)] * (not last)),
        "order": lambda: nn.ModuleDict({k: nn.Linear(2, 2) for k in ("ba" if last else "ab")}),
        "dtype": lambda: nn.Linear(2, 2).to(torch.bfloat16 if last else torch.float32),
        "frozen": lambda: nn.Linear(2, 2).requires_grad_(not last),
    }
    answers = {}
    for what, build in models.items():
        try:
            compose("ddp_flat").wrap(build())
        except ValueError as error:
            answers[what] = str(error)
    return answers


SCENARIOS = [mismatches]
