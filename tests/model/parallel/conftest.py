"""Fixtures that start the ranks of each world size once; the tests read their results."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.parallel.launch import launch
from tests.model.parallel.ranks import run_gpu_rank, run_rank

LIMIT_S = 50.0


class Ranks:
    """Results of all ranks of one world size."""

    def __init__(
        self, world_size: int, folder: Path, target: Callable[..., None] = run_rank, limit_s: float = LIMIT_S
    ) -> None:
        with (folder / "lock").open("w") as lock:  # test processes share the ranks of the first one
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (done := folder / "done").exists():
                launch(target, world_size, folder, limit_s=limit_s)
                done.touch()
        self._results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]

    def of(self, key: str) -> list[Any]:
        """Return each rank's result; a rank's exception fails the test with its traceback."""
        found = [results[key] for results in self._results]
        for rank, result in enumerate(found):
            assert not isinstance(result, str), f"rank {rank}: {result}"
        return found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a name to a folder that the test processes of one run share."""
    own = tmp_path_factory.getbasetemp()
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder(name: str) -> Path:
        (base / name).mkdir(exist_ok=True)
        return base / name

    return folder


@pytest.fixture(scope="session")
def ranks_by_size(shared: Callable[[str], Path]) -> Any:
    """Return a function from a world size to its Ranks, which it starts at the first call."""

    @cache
    def start(world_size: int) -> Ranks:
        return Ranks(world_size, shared(f"world{world_size}"))

    return start


@pytest.fixture(scope="session")
def gpu_ranks_by_size(shared: Callable[[str], Path]) -> Any:
    """Return a function from a world size to its Ranks, which train with NCCL on one GPU each."""

    @cache
    def start(world_size: int) -> Ranks:
        if (count := torch.cuda.device_count()) < world_size:
            pytest.skip(f"needs {world_size} CUDA devices, there are {count}")
        return Ranks(world_size, shared(f"gpus{world_size}"), run_gpu_rank)

    return start
