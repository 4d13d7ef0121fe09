"""Null profiler of `time`: it records nothing."""

from __future__ import annotations

from cs_systems.profilers import Profiler

PROFILER = Profiler()
