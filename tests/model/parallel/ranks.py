"""Work of each rank: every strategy × case and every scenario, in processes started once."""

from __future__ import annotations

import faulthandler
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs_systems.core import plugins
from cs_systems.model.parallel import ParallelStrategy, compose
from tests.model.parallel.fsdp_scenarios import FSDP_SCENARIOS
from tests.model.parallel.misuses import MISUSES
from tests.model.parallel.scenarios import SCENARIOS, narrowed
from tests.model.parallel.training import Case, train_rank, train_scaled

COLLECTIVE_LIMIT_S = 20

# Options of sending gradients with NCCL, by the name of their result.
ON_NCCL: dict[str, dict[str, Any]] = {
    "narrowed": {"comm_dtype": "bf16"},
    "prioritised": {"max_ctas": 4, "high_priority": True},
}


def cases(name: str, world_size: int) -> list[Case]:
    """Return the cases of a strategy: fewer for compositions, with parts tested alone, and for three ranks."""
    each = Case("fp32", micro_batches=2, finishes_each=True)
    exact = Case("fp32", micro_batches=2)
    low = Case("bf16" if composed(name).one_dtype else "mixed", micro_batches=2)
    if "+" in name and world_size == 3:
        return [exact]
    return [exact, low] if "+" in name or world_size == 3 else [Case("fp32"), exact, each, low, Case("bf16")]


TP_DEGREE = 2


def strategies(world_size: int) -> list[str]:
    """Return the strategies that train alone and the compositions; for 4 ranks, those with two dimensions."""
    if world_size == 2 * TP_DEGREE:
        found = {name: plugins.get("parallel", name) for name in plugins.names("parallel")}
        return [
            f"{name}+tp"
            for name, strategy in found.items()
            if "tp_degree" in strategy.options and "batch" in strategy.splits
        ]
    parts = {name: plugins.get("parallel", name).splits for name in plugins.names("parallel")}
    alone = [name for name, splits in parts.items() if {"batch", "features"} & splits]
    joined = [
        f"{first}+{second}"
        for second, splits in parts.items()
        if splits and not {"batch", "features"} & splits
        for first in alone
        if "batch" in parts[first] and not parts[first] & splits
    ]
    return alone + joined


def scaled() -> list[str]:
    """Return the strategies that two ranks train with a gradient scaler, each in one composition if it needs one."""
    return [name for name in strategies(2) if "+" not in name or name.startswith("ddp_flat+")]


def composed(name: str) -> ParallelStrategy:
    """Compose a strategy with small buckets, some ready during backward, and the options for unused parameters."""
    mesh = {"tp_degree": TP_DEGREE} if "+tp" in name else {}
    strategy = compose(name, **mesh)
    size = {"bucket_size_mb": 0.002} if "bucket_size_mb" in strategy.options else {}
    return compose(name, **mesh, **size, **strategy.for_unused)


def attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception:
        return traceback.format_exc()


# Gloo's threads may free the names of these collectives twice (see `torch_fsdp2`): a process that keeps 16 of the first
# in flight aborts within seconds, and one that waits for each aborted once in some 3 million. Short names are safe.
NAMED_ON_THE_HEAP = ("allgather_coalesced_", "allgather_into_tensor_coalesced_")


def refuse(*_: Any) -> None:
    raise RuntimeError("gloo's threads may crash on the name of this collective; use one that is not coalesced")


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run training and all scenarios of a rank on a CPU."""
    join("gloo", rank, world_size, folder)
    refusals = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns that these kernels are replaced
        for name in NAMED_ON_THE_HEAP:
            refusals.impl(name, refuse, "CPU")
    results = _train(rank, world_size, "cpu")
    if world_size == 2:
        results |= _shard(rank, world_size, "cpu")
        for name, fused in product(scaled(), (False, True)):
            work = partial(train_scaled, composed(name), rank, world_size, fused)
            results[f"{name}-scaled{'-fused' * fused}"] = attempt(work)
    for scenario in [*SCENARIOS, *MISUSES] if world_size < 2 * TP_DEGREE else []:
        results[scenario.__name__] = attempt(lambda s=scenario: s(rank, world_size))
    leave(results, rank, folder)


def run_gpu_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run training and the sharded scenarios of a rank on its GPU."""
    torch.cuda.set_device(rank)
    join("nccl", rank, world_size, folder)
    results = _train(rank, world_size, f"cuda:{rank}")
    if world_size == 2:
        results |= _shard(rank, world_size, f"cuda:{rank}")
        for name, options in ON_NCCL.items():
            results[name] = attempt(lambda options=options: narrowed(rank, world_size, f"cuda:{rank}", **options))
    leave(results, rank, folder)


def join(backend: str, rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()  # prints a rank's position when native code kills it
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
    )


def _train(rank: int, world_size: int, device: str) -> dict[str, Any]:
    return {
        f"{name}-{case}": attempt(lambda n=name, c=case: train_rank(composed(n), c, rank, world_size, device))
        for name in strategies(world_size)
        for case in cases(name, world_size)
    }


def _shard(rank: int, world_size: int, device: str) -> dict[str, Any]:
    return {s.__name__: attempt(lambda s=s: s(rank, world_size, device)) for s in FSDP_SCENARIOS}


def leave(results: dict[str, Any], rank: int, folder: Path) -> None:
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
