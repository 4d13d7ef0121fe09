"""Null profiler of `time`: it records nothing."""

from __future__ import annotations

from cs_systems.measure.profilers import Profiler

PROFILER = Profiler()
