"""Skips of tests without their GPU or extra, with the reasons; a run in which no test passed fails."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import extras, interpreter, parsers
from tests.nsys_lock import alone_with_nsys

pytest_plugins = ["tests.recorded"]

# No test depends on the speed of the machine.
settings.register_profile("without_deadline", deadline=None, max_examples=40)
settings.load_profile("without_deadline")
# Set before torch is imported, and inherited by workers: tiny tensors gain nothing from a second thread, and two test
# processes on two cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor writes scalar C++ for CPUs. To try vector instructions, each process would compile a library and start
# Python with torch again; the vector headers also take long to compile: a kernel takes 10 s of CPU instead of 22.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Collection imports torch and creates thousands of lasting objects; garbage collection took a third of its time.
gc.disable()
parsers.make_each_once()
if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.repeat_less()


# What each of these expressions after -m selects: the tests with one of these markers.
MARKED = {"slow": ("slow",), "extra": tuple(extras.EXTRAS)}
_frozen_modules = 0
_frozen_before: Path | None = None  # the file of tests before which objects were excluded last


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without a test that `-m slow` or `-m extra` selects: importing all takes 10 s of CPU."""
    selected = MARKED.get(config.option.markexpr)
    if selected is None or collection_path.suffix != ".py" or markers_named_in(collection_path) & {*selected}:
        return None
    return True


@cache
def markers_named_in(file: Path) -> frozenset[str]:
    """Return the markers that a file applies by their names."""
    return frozenset(re.findall(r"\bmark\.(\w+)", file.read_text()))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a test in a file that `pytest_ignore_collect` would leave out."""
    found = {mark.name for mark in item.iter_markers()} & {name for names in MARKED.values() for name in names}
    if unnamed := found - markers_named_in(item.path):
        raise pytest.UsageError(f"{item.nodeid} is marked {', '.join(unnamed)} in another file; apply pytest.mark here")


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the test if one of its extras is missing.

    Exclude what earlier tests have imported, and what earlier files keep, from garbage collection: with it, each
    collection takes 0.15 s, and a measurement makes several.
    """
    if len(sys.modules) > _frozen_modules + 100 or item.path != _frozen_before:
        gc.collect()
        _freeze(item.path)
    marked = _extras(item)
    extras.begin(marked)
    for name in sorted(marked):
        if reason := extras.missing(name):
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Refuse a test that leaves a Recorder, or a search for a script's loop: later tests would fail in its place."""
    yield
    recorders = sys.modules.get("cs_systems.measure.recorder.recorder")
    if recorders is None:
        return
    if recorders.hooks.is_active():
        every = [*recorders._recorders]
        found = f"{item.nodeid} left a Recorder open: {every}"
        for each in every:
            each.close()
        pytest.fail(found)
    autograd = sys.modules["torch.autograd"]
    if autograd._engine_run_backward is not autograd.graph._engine_run_backward:
        autograd._engine_run_backward = autograd.graph._engine_run_backward
        pytest.fail(f"{item.nodeid} left a recorder that waits for the first backward pass of a script")


def _extras(item: pytest.Item) -> frozenset[str]:
    return frozenset(mark.name for mark in item.iter_markers()) & extras.EXTRAS.keys()


def _freeze(before: Path | None = None) -> None:
    global _frozen_modules, _frozen_before
    _frozen_modules, _frozen_before = len(sys.modules), before
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _extras(item):
            item.add_marker("extra")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    _longest_first(items)


def _longest_first(items: list[pytest.Item]) -> None:
    """Move the modules with the longest time limits to the front: at the end, other processes would wait for them."""
    limits: dict[Path, float] = {}
    for item in items:
        limit_s = max((mark.args[0] for mark in item.iter_markers("timeout")), default=0.0)
        limits[item.path] = max(limits.get(item.path, 0.0), limit_s)
    items.sort(key=lambda item: -limits[item.path])


@pytest.fixture(autouse=True)
def locked_nsys(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests marked nsys one at a time."""
    if request.node.get_closest_marker("nsys") is None:
        yield
        return
    with alone_with_nsys():
        yield


def _has_cuda() -> bool:
    import torch  # imported only for GPU tests, so that tests without torch start at once

    return torch.cuda.is_available()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Exit with status 5 if every test was skipped, as if no test was collected; pytest would exit with 0."""
    terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    is_xdist_worker = hasattr(session.config, "workerinput")
    if terminal is None or is_xdist_worker or session.config.option.collectonly:
        return
    if exitstatus == pytest.ExitCode.OK and not terminal.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
