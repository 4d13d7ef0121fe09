"""Profiler `nsys`: the worker runs under `nsys profile` of Nsight Systems, which records only the timed steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cs_systems.measure.profilers import Collected, Profiler
from cs_systems.measure.profilers._nsys import export, launch, problem, region
from cs_systems.measure.profilers._tables import tables
from cs_systems.readers.forms.modules import modules_file
from cs_systems.record import RunRecord


def collect(out: Path, record: RunRecord) -> Collected:
    report, database = export(out)
    found, modules = tables(database, record), modules_file(database)
    files = {"nsys": report, "sqlite": database} | ({"modules": modules} if modules.is_file() else {})
    return replace(found, artifacts=files)


PROFILER = Profiler(problem, launch, region, collect=collect, instead=("use --with kineto", 'use profiler="kineto"'))
