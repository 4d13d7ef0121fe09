"""Tests of the cache of traces: it equals a fresh reading, and is never used for another state of the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.readers import _cache as cache
from cs_systems.readers import read
from cs_systems.readers._cache import cached
from cs_systems.readers.forms.columns import Categorical
from cs_systems.readers.forms.modules import Modules
from cs_systems.readers.forms.operators import Operators
from cs_systems.readers.forms.trace import Trace
from tests.analysis.comparison.test_ranks import write


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "WORTH_S", 0.0)
    monkeypatch.setattr(cache, "SETTLED_S", -1e9)


class Counting:
    """Reader that counts how often it reads."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, path: Path, process: int | None) -> Trace:
        self.times += 1
        return read(path, process)


def assert_same(a: Any, b: Any) -> None:
    """Compare two traces by all their values and types."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, Categorical):
        assert list(a.values) == list(b.values)
        assert_same(a.codes, b.codes)
    elif isinstance(a, Modules):
        assert vars(a) == vars(b)
    elif isinstance(a, Operators):
        assert [*vars(a)] == [*vars(b)]
        for name in vars(a):
            assert_same(getattr(a, name), getattr(b, name))
    elif is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


@pytest.fixture(params=["nsys", "kineto", "messages"])
def path(request: pytest.FixtureRequest, tmp_path: Path, nsys_path: Path, kineto_path: Path) -> Path:
    if request.param == "messages":
        return write(tmp_path, 1)
    return Path(shutil.copy({"nsys": nsys_path, "kineto": kineto_path}[request.param], tmp_path))


def test_cached_trace_equals_a_fresh_reading(path: Path) -> None:
    reader = Counting()
    first, second = (cached(path, None, reader) for _ in range(2))
    assert reader.times == 1
    assert_same(first, second)
    assert oct(cache.folder().stat().st_mode)[-3:] == "700"


def test_modules_are_kept_with_their_source(kineto_path: Path, kineto_trace: Trace) -> None:
    row = dict.fromkeys(("path", "class", "range", "stack", "block", "layer", "part"), "a") | {"parameters": 1}
    made = replace(kineto_trace, modules=Modules([row], "from Python's stacks"))
    first, second = (cached(kineto_path, process, lambda *_: made) for process in (None, None))
    assert first is made
    assert second is not made
    assert_same(first, second)


@pytest.fixture
def one(tmp_path: Path, kineto_path: Path) -> Path:
    return Path(shutil.copy(kineto_path, tmp_path / "one.json.gz"))


def change_content(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as after `cp -p` or `touch -r`


def replace_file(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


def damage(path: Path) -> None:
    (entry,) = cache.folder().glob("*.npz")
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 255
    entry.write_bytes(content)


def cut(path: Path) -> None:
    (entry,) = cache.folder().glob("*.npz")
    entry.write_bytes(entry.read_bytes()[:-1000])


def other_entry(path: Path) -> None:
    (entry,) = cache.folder().glob("*.npz")
    content = entry.read_bytes().replace(b"one.json.gz", b"two.json.gz")
    entry.write_bytes(content)


@pytest.mark.parametrize("change", [os.utime, change_content, replace_file, damage, cut, other_entry])
def test_changed_file_or_entry_is_read_again(one: Path, change: Callable[[Path], None]) -> None:
    reader = Counting()
    first = cached(one, None, read=reader)
    change(one)
    assert_same(first, cached(one, None, read=reader))
    assert reader.times == 2
    assert_same(first, cached(one, None, read=reader))
    assert reader.times == 2


def test_other_code_or_process_is_read_again(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Counting()
    first = cached(one, None, read=reader)
    pid = 482
    cached(one, pid, read=reader)
    monkeypatch.setattr(cache, "_version", lambda: "another")
    assert_same(first, cached(one, None, read=reader))
    assert reader.times == 3


@pytest.mark.parametrize("file", ["kineto.py", "forms/trace.py"])
def test_changed_file_of_the_readers_changes_the_version(tmp_path: Path, file: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        shutil.copytree(Path(cache.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert cache._version(before) == cache._version(after)
    with (after / file).open("a") as changed:
        changed.write("CHANGED = True\n")
    assert cache._version(before) != cache._version.__wrapped__(after)


def test_file_that_changed_just_now_is_not_kept(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_S", 60.0)
    cached(one, None, read=Counting())
    assert not cache.folder().exists()


def test_entries_used_longest_ago_are_removed(tmp_path: Path, one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(shutil.copy(one, tmp_path / f"{n}.json.gz")) for n in range(3)]
    cached(paths[0], None, read=Counting())
    (first,) = cache.folder().iterdir()
    os.utime(first, (1, 1))
    monkeypatch.setattr(cache, "LARGEST_BYTES", int(2.5 * first.stat().st_size))
    for path in paths[1:]:
        cached(path, None, read=Counting())
    assert not first.exists()
    assert len(list(cache.folder().iterdir())) == 2
    monkeypatch.setattr(cache, "LARGEST_BYTES", 1000)
    cached(one, None, read=Counting())
    assert len(list(cache.folder().iterdir())) == 2  # too large for the cache


def test_unwritable_cache_folder_is_not_an_error(one: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert len(cached(one, None, read=Counting()).kernels) == 714
