"""Work of analyze and snapshot grows linearly with the file: it is counted, since clocks are noisy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cs_systems.analysis.attribution import tables
from cs_systems.analysis.attribution import timeline as view
from cs_systems.analysis.attribution.overlap import streams
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.tables import NO_COSTS
from cs_systems.analysis.comparison.profiles import difference
from cs_systems.analysis.memory import tables as memory_tables
from cs_systems.analysis.memory import timeline as memory_view
from cs_systems.analysis.memory.allocations import Replay, replay
from cs_systems.analysis.memory.categories import Attribution, attribute
from cs_systems.analysis.memory.tensor_names import TensorNames, tensor_names
from cs_systems.cli._snapshot_text import heading, notes
from cs_systems.core.range_names import SPLITS
from cs_systems.readers.forms.trace import Trace
from cs_systems.readers.snapshot import Snapshot, read
from tests.analysis.attribution import large
from tests.analysis.attribution.work import counted, work_of

MOST_GROWTH = 2.2  # limit of the work ratio when the input doubles: a quadratic loop with a tenth of the work gives 2.2
GROWTHS = {
    "steps": ((60, 4), (120, 4)),
    "blocks": ((4, 60), (4, 120)),
}  # what doubles → (steps, blocks), before and after
grows = pytest.mark.parametrize("sizes", GROWTHS.values(), ids=GROWTHS)


class Analysis(NamedTuple):
    """Input of every table of analyze."""

    trace: Trace
    of_cpu: Trace
    profile: Profile


class Memory(NamedTuple):
    """Input of every table of snapshot."""

    path: Path
    snapshot: Snapshot
    replay: Replay
    found: Attribution
    names: TensorNames


@cache
def analysis(steps: int, blocks: int) -> Analysis:
    trace = large.trace(steps, blocks)
    return Analysis(trace, large.trace(steps, blocks, kernels=False), profile(trace))


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Memory]:
    @cache
    def made(steps: int, blocks: int) -> Memory:
        path = tmp_path_factory.mktemp("snapshot") / "made.pickle"
        path.write_bytes(pickle.dumps(large.snapshot(steps, blocks)))
        snapshot = read(path)
        found = attribute(replay(snapshot))
        return Memory(path, snapshot, found.replay, found, tensor_names(found))

    return made


def _table(name: str) -> Callable[[Analysis], object]:
    return lambda of: tables.notes(name, of.profile, tables.TABLES[name](of.profile, NO_COSTS))


def _memory_table(name: str) -> Callable[[Memory], object]:
    return lambda of: notes(name, of.found, memory_tables.TABLES[name](of.found, of.names))


ANALYZE: dict[str, Callable[[Analysis], object]] = {
    "profile": lambda of: profile(of.trace),
    "streams of kernels": lambda of: streams(of.trace),
    "streams of ranges": lambda of: streams(of.of_cpu),
    "page": lambda of: view.view(of.profile),
    "comparison": lambda of: [difference(of.profile, of.profile, by) for by in SPLITS.values()],
    **{f"table {name}": _table(name) for name in tables.TABLES},
}
SNAPSHOT: dict[str, Callable[[Memory], object]] = {
    "read": lambda of: read(of.path),
    "replay": lambda of: replay(of.snapshot),
    "attribute": lambda of: attribute(of.replay),
    "names": lambda of: tensor_names(of.found),
    "heading": lambda of: heading(of.found, of.names),
    "page": lambda of: memory_view.view(of.found, of.names),
    "comparison": lambda of: memory_tables.differences(of.found, of.found, memory_tables.where),
    **{f"table {name}": _memory_table(name) for name in memory_tables.TABLES},
}


@grows
@pytest.mark.parametrize("part", ANALYZE)
def test_analyze_work_is_linear_in_the_trace(part: str, sizes: tuple[tuple[int, int], ...]) -> None:
    before, after = (work_of(ANALYZE[part], analysis(*size)) for size in sizes)
    assert after / before < MOST_GROWTH


@grows
@pytest.mark.parametrize("part", SNAPSHOT)
def test_snapshot_work_is_linear_in_the_snapshot(part: str, sizes: tuple[tuple[int, int], ...], memory: Any) -> None:
    before, after = (work_of(SNAPSHOT[part], memory(*size)) for size in sizes)
    assert after / before < MOST_GROWTH


def test_trace_without_collectives_skips_stream_work() -> None:
    silent, communicating = (
        work_of(tables.overlap, profile(large.trace(60, 4, communicates=communicates)), NO_COSTS)
        for communicates in (False, True)
    )
    assert silent < communicating / 10


def _nested_loops(n: int) -> None:
    for _ in range(n):
        for _ in range(n):
            pass


def _comprehensions(n: int) -> None:
    for i in range(n):
        [j for j in range(n) if j == i]


def _masks(n: int) -> None:
    values = counted(np.arange(n))
    for i in range(n):
        values[values == i].tolist()


def _searches(n: int) -> None:
    values = counted(np.arange(n)) + 1
    for _ in range(n):
        np.flatnonzero(np.where(values > 0, values, 0))


@pytest.mark.parametrize("quadratic", [_nested_loops, _comprehensions, _masks, _searches])
def test_count_detects_quadratic_loop(quadratic: Callable[[int], None]) -> None:
    assert 3 < work_of(quadratic, 400) / work_of(quadratic, 200) < 4.1
