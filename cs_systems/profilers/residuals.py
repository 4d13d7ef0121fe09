"""What forward keeps for backward, in the first recorded step: by module and operation, and by block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError
from cs_systems.memory_fit import algorithm_of
from cs_systems.memory_model import kept_by_a_block, residual_stream_bytes
from cs_systems.profilers import Collected, ProfileLost, Profiler
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.device import Device


def rows_path(out: Path) -> Path:
    return Path(f"{out}.residuals.json")


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    from cs_systems.saved_tensors import by_block, saved_tensors, summed

    with saved_tensors(model) as found:
        yield
    rows_path(out).write_text(json.dumps({"residuals": summed(found.rows), "residual_blocks": by_block(found.rows)}))


def collect(out: Path, record: RunRecord) -> Collected:
    path = rows_path(out)
    if not path.is_file():
        raise ProfileLost("no saved tensor was listed: is there room on the disk?")
    results = json.loads(path.read_text())
    path.unlink()
    if record.config["workload"] == "train_step":
        results["residual_stream"] = [{"bytes": residual_stream_bytes(record.run_config)}]
    predicted = _kept_by_a_block(record)
    for row in results["residual_blocks"]:
        row["predicted_bytes"] = predicted if row["block"].startswith("block") else None
    return Collected({}, results)


def _kept_by_a_block(record: RunRecord) -> int | None:
    """By the closed form of eager code without checkpoints; None for anything else."""
    config = record.run_config
    if config.workload != "train_step" or config.checkpoint != "none" or record.environment is None:
        return None
    config = replace(config, device="cpu" if record.environment.device == "cpu" else "cuda")
    try:
        return kept_by_a_block(config, algorithm_of(config))
    except ConfigError:
        return None


PROFILER = Profiler(region=region, collect=collect)
