"""Profiler of transformer training: time and memory by component, compared with the limits of the hardware.

    import cs_systems
    from cs_systems.config import RunConfig, grid

    record = cs_systems.run(RunConfig(attention="sdpa_flash"))  # one config → one RunRecord, in its own process
    record.frame()                                              # → DataFrame, one row per phase
    frame = cs_systems.load("runs/some-folder")                 # all records of a sweep

Importing this package imports neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cs_systems.config import PRESETS, AttentionShape, ModelConfig, RunConfig, grid, preset
from cs_systems.core.version import __version__

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis import diagnose
    from cs_systems.measure.recorder import Recorder
    from cs_systems.measure.runtime.sweep import preflight, run, sweep
    from cs_systems.measure.workloads._setup import TrainingSetup
    from cs_systems.record import RunRecord, read_records
    from cs_systems.report.frame import frame, load

# Imported on first access, so that `cs-systems --help` stays fast.
_LAZY = {
    "Recorder": "cs_systems.measure.recorder",
    "RunRecord": "cs_systems.record",
    "TrainingSetup": "cs_systems.measure.workloads._setup",
    "diagnose": "cs_systems.analysis.diagnosis",
    "read_records": "cs_systems.record",
    "frame": "cs_systems.report.frame",
    "load": "cs_systems.report.frame",
    "preflight": "cs_systems.measure.runtime.sweep",
    "run": "cs_systems.measure.runtime.sweep",
    "sweep": "cs_systems.measure.runtime.sweep",
}

__all__ = [
    "PRESETS",
    "AttentionShape",
    "ModelConfig",
    "Recorder",
    "RunConfig",
    "RunRecord",
    "TrainingSetup",
    "__version__",
    "diagnose",
    "frame",
    "grid",
    "load",
    "preflight",
    "preset",
    "read_records",
    "run",
    "sweep",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cs_systems' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
