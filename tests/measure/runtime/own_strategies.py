"""Rank that trains by strategies of the user's own, and compares each with one process."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cs_systems.cli.parallel import CHECKED
from cs_systems.machine.device import resolve
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.strategy_error import StrategyError
from tests.model.parallel.ranks import join


def compared_with_one_process(rank: int, world_size: int, folder: Path) -> None:
    """Train by each strategy in this rank, as a worker does."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    join("gloo", rank, world_size, folder)
    found: dict[str, Any] = {}
    for name in json.loads(Path("names.json").read_text()):
        size = 1.0 if "bucket" in name else None
        config = replace(CHECKED, strategy=name, world_size=world_size, bucket_size_mb=size)
        try:
            workload = StrategyError(Cell(config), resolve("cpu"))
            for _, phase in workload.step():
                phase()
            (found[name],) = workload.rows
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    Path(f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
