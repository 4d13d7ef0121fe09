"""Hostile files: none runs code, exhausts time or memory, or ends a command in a traceback."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cs_systems.cli import main
from cs_systems.cli._output import FORMATS
from tests.hostile import files

RECORDS = Path(__file__).parents[2] / "profiles" / "step_time" / "records.jsonl"
MOST_MEMORY = 1 << 30
PATIENCE_S = 50  # reading a bomb would take minutes or never end
# Run a command on each file in one process with limited memory, and print its exit status and error message.
READ_FILES = f"""
import contextlib, io, json, resource, sys
from cs_systems.cli import main
import cs_systems.analysis.attribution.profile, cs_systems.readers.snapshot
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {MOST_MEMORY}, resource.RLIM_INFINITY))
for path in sys.argv[2:]:
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):
        status = main([sys.argv[1], path])
    print(json.dumps([path, status, error.getvalue()]), flush=True)
"""
FUZZED = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def results(command: str, paths: Sequence[Path], folder: Path) -> list[tuple[str, int, str]]:
    words = [sys.executable, "-c", READ_FILES, command, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]  # type: ignore[misc]


def write_pickles(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    for name, content in contents.items():
        (folder / f"{name}.pickle").write_bytes(content)
    return [folder / f"{name}.pickle" for name in contents]


def test_pickle_opcodes_call_nothing(tmp_path: Path) -> None:
    found = results("snapshot", write_pickles(tmp_path, files.CALLING), tmp_path)
    assert len(found) == len(files.CALLING)
    for path, status, message in found:
        assert status == 2, path
        assert message.startswith(f"cs-systems: {path} "), message
        assert "was not loaded: it refers to" in message or "is a damaged pickle" in message, message
    assert not (tmp_path / files.CANARY).exists()


@pytest.mark.parametrize("opcode", ["REDUCE", "REDUCE of protocol 0", "INST", "OBJ"])
def test_planted_call_runs_with_plain_pickle(opcode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(files.CALLING[opcode])
    assert (tmp_path / files.CANARY).exists()


def test_pickle_bombs_are_refused(tmp_path: Path) -> None:
    paths = write_pickles(tmp_path, files.pickle_bombs())
    found = results("snapshot", paths, tmp_path)
    assert len(found) == len(paths)
    for path, status, message in found:
        assert status == 2, path
        assert message.startswith(f"cs-systems: {path} "), message


def test_trace_bombs_are_refused(tmp_path: Path) -> None:
    paths = [files.trace_bomb(tmp_path / f"{name}.json.gz", name) for name in files.TRACE_BOMBS]
    found = results("analyze", paths, tmp_path)
    assert len(found) == len(paths)
    for path, status, message in found:
        assert status == 2, path
        assert message.startswith(f"cs-systems: {path} "), message
        assert any(
            wrong in message for wrong in ("decompresses to", "million characters", "nested hundreds of levels deep")
        ), message


def test_hostile_nsys_exports_are_read_or_refused(tmp_path: Path) -> None:
    paths = [files.small_export(tmp_path / f"{name}.sqlite", *sql) for name, sql in files.HOSTILE_SQL.items()]
    found = results("analyze", [files.small_export(tmp_path / "none.sqlite"), *paths], tmp_path)
    assert found[0][1] == 0, found[0]
    assert [path for path, *_ in found[1:]] == [str(path) for path in paths]
    assert {status for _, status, _ in found} <= {0, 2}


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_names_are_printed_in_every_format(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check only that no name makes a command fail; other tests check how each format escapes it."""
    trace, snapshot = tmp_path / "trace.json", tmp_path / "made.pickle"
    for name in files.NAMES:
        trace.write_text(json.dumps(files.small_trace(name)))
        snapshot.write_bytes(pickle.dumps(files.small_snapshot(name)))
        for command, path, table in (("analyze", trace, "kernels"), ("snapshot", snapshot, "alive")):
            chosen = ["--table", table] if format == "csv" else []
            assert main([command, str(path), "--format", format, *chosen]) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    "properties",
    [
        None,
        5,
        "H200",
        {"id": 0},
        [5],
        [{"id": "0"}],
        [{"id": []}],
        [{"id": 1e400}],
        [{"name": {}}],
        [{"id": 0, "name": []}],
    ],
)
def test_invalid_device_properties_are_ignored(
    properties: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**files.small_trace(), "deviceProperties": properties}))
    assert main(["analyze", str(path)]) == 0
    assert "kineto" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["deviceProperties", "event"])
def test_number_of_thousands_of_digits_is_refused(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = files.small_trace()
    trace["traceEvents"][3]["args"]["correlation"] = 77777 if where == "event" else 1
    trace["deviceProperties"][0]["id"] = 77777 if where != "event" else 0
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace).replace("77777", "7" * 5000))
    assert main(["analyze", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert "digits" in error


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e300, "late", None])
def test_kernels_with_invalid_times_are_refused_as_damage(
    time: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = files.small_trace()
    trace["traceEvents"][3]["ts"] = time
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    assert main(["analyze", str(path)]) == 2
    error = capsys.readouterr().err
    assert "is damaged: no kernel has a valid time and valid numbers of its thread or device (1 kernel" in error
    assert f"a kernel with name 'gemm', ts {time!r}" in error


def test_event_with_invalid_time_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = files.small_trace()
    trace["traceEvents"].insert(0, trace["traceEvents"][1] | {"ts": float("nan")})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    assert main(["analyze", str(path)]) == 0
    assert "left out: 1 event without a valid time or number" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("protocol", range(6))
def test_snapshot_of_any_pickle_protocol_is_read(
    protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.pickle"
    path.write_bytes(pickle.dumps(files.small_snapshot(), protocol))
    assert main(["snapshot", str(path)]) == 0
    assert "512" in capsys.readouterr().out


SIDECAR = {
    "schema_version": 1,
    "config": None,
    "max_allocated_bytes": 512,
    "tensors": [{"kind": "buffer", "name": "x", "address": 4096, "bytes": 500, "shape": [5], "dtype": "int8"}],
}


@pytest.mark.parametrize(
    "changed",
    [
        {"max_allocated_bytes": "many"}, {"tensors": ["x"]}, {"tensors": 5}, {"config": "small"}, {"config": [1]},
        {"tensors": [SIDECAR["tensors"][0] | {"shape": ["a"]}]}, {"tensors": [SIDECAR["tensors"][0] | {"bytes": "5"}]},
        {"tensors": [SIDECAR["tensors"][0] | {"kind": ["buffer"]}]}, {"max_allocated_bytes": -1},
    ],
)  # fmt: skip
def test_sidecar_with_wrong_types_is_refused(
    changed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.pickle"
    path.write_bytes(pickle.dumps(files.small_snapshot()))
    beside = Path(f"{path}.json")
    beside.write_text(json.dumps(SIDECAR))
    assert main(["snapshot", str(path)]) == 0
    capsys.readouterr()
    beside.write_text(json.dumps(SIDECAR | changed))
    assert main(["snapshot", str(path)]) == 2
    assert str(beside) in capsys.readouterr().err or "config" in changed


def record() -> dict[str, Any]:
    with RECORDS.open() as file:
        made: dict[str, Any] = json.loads(file.readline())
    return made


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("wall_s", 1e308, "wall_s of a sample is 1e+308, not a time from 0 to 1e+09 s"),
        ("wall_s", -1.0, "wall_s of a sample is -1.0, not a time"),
        ("wall_s", float("nan"), "wall_s of a sample is nan, not a time"),
        ("wall_s", "3", "wall_s of a sample is '3', not a time"),
        ("repeat", "3", "repeat is '3', not a whole number"),
        ("repeat", 10**30, f"repeat is {10**30}, not a whole number from 0 to 2^63 - 1"),
        ("config", [], "config is a list, not an object"),
        ("results", {"cost": 5}, "results 'cost' is 5, not a list of rows"),
    ],
)
def test_record_with_wrong_types_is_refused(
    field: str, value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = record()
    samples = data["measurement"]["samples"]
    (samples if field in samples else data)[field] = [value] * len(samples["wall_s"]) if field in samples else value
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(data) + "\n")
    assert main(["report", str(path)]) == 2
    assert f"{path}:1 is malformed: {message}" in capsys.readouterr().err


SMALL = {
    "analyze": json.dumps(files.small_trace()).encode(),
    "snapshot": pickle.dumps(files.small_snapshot()),
    "report": RECORDS.read_bytes().splitlines(keepends=True)[0],
}


@pytest.mark.parametrize("command", SMALL)
@FUZZED
@given(data=st.data())
def test_damaged_bytes_are_read_or_refused(
    command: str, data: st.DataObject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(SMALL[command])
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.bin"
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    assert main([command, str(path)]) in (0, 2)
    capsys.readouterr()


ODD = st.sampled_from([None, True, -1, 0, 1e308, float("nan"), 10**30, "", "7", [], {}, [[]], {"a": []}])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, one in inside for place in places(one, (*path, key))]


def swapped(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    changed = copy.deepcopy(value)
    *outer, last = path
    target = changed
    for key in outer:
        target = target[key]
    target[last] = other
    return changed


@pytest.mark.parametrize("make", [files.small_trace, files.small_scopes, files.small_failure])
@FUZZED
@given(data=st.data())
def test_swapped_types_are_read_or_refused(
    make: Callable[[], Any], data: st.DataObject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make()
    command = "analyze" if make in (files.small_trace, files.small_scopes) else "snapshot"
    changed = swapped(made, data.draw(st.sampled_from(places(made))), data.draw(ODD))
    path = tmp_path / "swapped.bin"
    path.write_bytes(json.dumps(changed).encode() if command == "analyze" else pickle.dumps(changed))
    assert main([command, str(path)]) in (0, 2)
    capsys.readouterr()
