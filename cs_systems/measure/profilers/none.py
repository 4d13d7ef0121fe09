"""Profiler `none`, which records nothing, so that a cell is only timed."""

from __future__ import annotations

from cs_systems.measure.profilers import Profiler

PROFILER = Profiler()
