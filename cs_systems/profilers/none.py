"""Nobody watches: what `time` does."""

from __future__ import annotations

from cs_systems.profilers import Profiler

PROFILER = Profiler()
