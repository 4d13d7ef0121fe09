"""Launcher of test ranks, which ends all of them if one hangs or dies. It does not import torch."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import server


def launch(target: Callable[..., None], world_size: int, folder: Path, *, limit_s: float) -> None:
    """Run `target(rank, world_size, folder)` in N processes; AssertionError for a rank that fails or takes longer."""
    forks = server()
    ranks: list[Any] = [
        forks.Process(target=_run, args=(target.__module__, target.__name__, rank, world_size, folder), daemon=True)
        for rank in range(world_size)
    ]
    end = time.monotonic() + limit_s
    try:
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            _check(ranks)
            alive = [rank for rank, p in enumerate(ranks) if p.is_alive()]
            assert time.monotonic() < end, f"ranks {alive} still ran after {limit_s} s"
            time.sleep(0.05)
        _check(ranks)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def _run(module: str, target: str, *arguments: Any) -> None:
    """Import the module without garbage collection, which doubles the time of an import, and call the target."""
    loaded = importlib.import_module(module)
    gc.freeze()
    gc.enable()
    getattr(loaded, target)(*arguments)


def _check(ranks: list[Any]) -> None:
    """Raise AssertionError for ranks that have failed; running ranks have no exit code yet."""
    failed = {rank: p.exitcode for rank, p in enumerate(ranks) if p.exitcode}
    assert not failed, f"exit codes by rank: {failed}"
