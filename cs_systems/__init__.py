"""Profile the training of transformers: where the time and the memory go, how far that is from what the chip can do.

    import cs_systems
    from cs_systems.config import RunConfig, grid

    record = cs_systems.run(RunConfig(attention="sdpa_flash"))  # one config → one RunRecord, from a process of its own
    record.frame()                                              # → DataFrame, one row a phase
    frame = cs_systems.load("runs/some-folder")                 # everything that a sweep recorded

Importing this package imports neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cs_systems.config import PRESETS, AttentionShape, ModelConfig, RunConfig, grid, preset
from cs_systems.version import __version__

if TYPE_CHECKING:
    from cs_systems.record import RunRecord, read_records
    from cs_systems.report.frame import frame, load
    from cs_systems.runtime.sweep import preflight, run, sweep

# Looked up when first asked for: `cs-systems --help` pays for none of them.
_LAZY = {
    "RunRecord": "cs_systems.record",
    "read_records": "cs_systems.record",
    "frame": "cs_systems.report.frame",
    "load": "cs_systems.report.frame",
    "preflight": "cs_systems.runtime.sweep",
    "run": "cs_systems.runtime.sweep",
    "sweep": "cs_systems.runtime.sweep",
}

__all__ = [
    "PRESETS",
    "AttentionShape",
    "ModelConfig",
    "RunConfig",
    "RunRecord",
    "__version__",
    "frame",
    "grid",
    "load",
    "preflight",
    "preset",
    "read_records",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cs_systems' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
