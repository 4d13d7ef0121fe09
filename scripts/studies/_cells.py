"""Measured cell of a study, for its tables and explanations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs_systems.config import describe
from cs_systems.record import Row, RunRecord

SCRIPTS = Path(__file__).resolve().parents[1]


def script(name: str) -> str:
    """Return the path of a file of scripts/ as the cells name it: relative if run in the root of the repository.

    In another folder the path is absolute, so that a study runs from any folder.
    """
    file = SCRIPTS / name
    return (file.relative_to(Path.cwd()) if SCRIPTS.parent == Path.cwd() else file).as_posix()


@dataclass(frozen=True)
class Cell:
    """One record under the names of the tables' columns: `cell["size"]`, `cell["median_s"]` of the step,
    `cell["backward.median_s"]` of a phase, and the fields of what `ran`; `cell["backward.kernel_s"]` where the same
    was profiled (see `_kernels`); None where unknown."""

    record: RunRecord
    columns: Row = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.columns.get(name)

    def label(self, *without: str) -> str:
        """Return the options that distinguish the cell as part of a sentence, without those named in `without`."""
        return describe(self.record.run_config, without)

    @property
    def measured(self) -> bool:
        return self.record.status == "ok" and self.record.is_timing

    @property
    def profiled(self) -> bool:
        """Return true if the cell ran under a profiler, so that its times do not count as timings."""
        return bool(self.record.config.get("profiler", CLEAN) != CLEAN)


CLEAN = "none"


def place(cells: Sequence[Cell]) -> str:
    """Return the devices on which the cells were measured, as the beginning of a sentence."""
    ran = [cell for cell in cells if cell.record.environment and cell.record.status != "unavailable"]
    names = dict.fromkeys(cell.record.environment.device_name for cell in ran if cell.record.environment)
    ranks = {cell.record.run_config.world_size for cell in ran}
    on_gpus = any(cell.record.environment.compute_capability for cell in ran if cell.record.environment)
    count = "" if not on_gpus else "one " if ranks <= {1} else f"up to {max(ranks)} "
    return f"On {count}{' and '.join(names) or 'an unknown device'}"
