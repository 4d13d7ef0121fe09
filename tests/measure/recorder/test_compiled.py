"""Tests that `cs-systems run` does not change a script's graphs, graph breaks and compilations by torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems.record import read_records
from tests import forks
from tests.measure.recorder import compiled

LOOPS = [
    pytest.param(loop.__name__, marks=pytest.mark.slow) if loop in compiled.SLOW else loop.__name__
    for loop in compiled.LOOPS
]


def both(backend: str, loop: str, out: Path) -> tuple[str, str]:
    """Return the output of the script's loops, alone and recorded."""
    run = ["-m", "cs_systems", "run", "--steps", "2:5", "--with", "kineto", "--out", str(out), "--"]
    # Fill Inductor's cache first: with an empty one it runs functions that torch.compile also counts. All tests share
    # it, because each new cache compiles the headers of its C++ again.
    programs = ([], [], run) if backend == "inductor" else ([], run)
    done = [forks.python(*before, compiled.__file__, backend, loop, timeout_s=170) for before in programs]
    assert [each.returncode for each in done] == [0] * len(programs), done
    return done[-2].stdout, done[-1].stdout


@pytest.mark.timeout(180)
@pytest.mark.parametrize("loop", LOOPS)
def test_script_is_compiled_as_without_recording(loop: str, tmp_path: Path) -> None:
    alone, recorded = both("aot_eager", loop, tmp_path)
    assert recorded == alone
    assert "Module._wrapped_call_impl _engine_run_backward" in alone, "torch's own functions are in their place"
    timed, profiled = read_records(tmp_path)[0]
    assert (timed.status, profiled.status) == ("ok", "ok")
    assert all("cs_systems" not in str(row) for row in timed.results.get("graph_breaks", ()))


# What the other loops add, other shapes, evaluation and a reset, acts before the backend compiles a graph.
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("loop", ["whole_step", "model_that_compiles_itself"])
def test_script_under_inductor_is_compiled_as_without_recording(loop: str, tmp_path: Path) -> None:
    alone, recorded = both("inductor", loop, tmp_path)
    assert recorded == alone
