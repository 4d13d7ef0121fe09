"""Records: one line each, read back unchanged, with incomplete and invalid lines reported."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import origin
from cs_systems.core.caveats import Caveat
from cs_systems.record import (
    SCHEMA_VERSION,
    Environment,
    Measurement,
    RunRecord,
    Sample,
    append_record,
    make_key,
    read_records,
)

ENVIRONMENT = Environment(
    cs_systems="0.1.0",
    code_version="abc",
    git_commit="123+",
    python="3.11",
    torch="2.13",
    triton=None,
    cuda=None,
    cudnn=None,
    platform="Linux",
    cpu="a CPU",
    cpu_threads=2,
    device="cpu",
    device_name="a CPU",
    throttle_reasons=("power cap",),
)
seconds = st.floats(0, 1e3)
samples = st.builds(
    Sample,
    round=st.integers(0, 3),
    warmup=st.booleans(),
    wall_s=seconds,
    phases_s=st.just({}) | st.fixed_dictionaries({"forward": seconds, "backward": seconds}),
    submit_s=st.just({}) | st.fixed_dictionaries({"forward": seconds, "backward": seconds}),
    device_mallocs=st.none() | st.integers(0, 9),
)
records = st.builds(
    RunRecord,
    key=st.text("abcdef", min_size=4),
    config=st.just(RunConfig().to_dict()),
    status=st.sampled_from(["ok", "oom", "error"]),
    reason=st.none() | st.text(),
    environment=st.none() | st.just(ENVIRONMENT),
    measurement=st.none() | st.builds(Measurement, st.just("monotonic"), st.lists(samples).map(tuple), seconds),
    warnings=st.just(()) | st.just((Caveat("unstable", "so", "do"),)),
    results=st.just({}) | st.just({"cost": [{"phase": "forward", "model_flops": 7}]}),
)


@given(records)
def test_record_round_trips_json(record: RunRecord) -> None:
    line = record.to_json()
    assert "\n" not in line
    again = RunRecord.from_dict(json.loads(line))
    assert again == record
    assert again.run_config == RunConfig()


def test_record_is_stamped_once_with_date_and_command_and_the_host_on_request() -> None:
    with origin.by("cs-systems time"):
        record = some("a").stamped()
        named = some("a").stamped(record_host=True)
    assert record.origin is not None
    assert abs(record.origin.recorded_unix_s - time.time()) < 60
    assert (record.origin.command, record.origin.host) == ("cs-systems time", None)
    assert named.origin is not None
    assert named.origin.host == socket.gethostname()
    assert record.stamped(record_host=True) == record
    assert RunRecord.from_dict(json.loads(named.to_json())) == named


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"recorded_unix_s": "today"}, "recorded_unix_s is 'today', not a time from 0 to 2e+11 s"),
        ({"recorded_unix_s": 1e300}, "recorded_unix_s is 1e+300, not a time"),
        ({"recorded_unix_s": float("nan")}, "recorded_unix_s is nan, not a time"),
        ({"command": 3}, "command is 3, not a text or null"),
        ({"host": ["a"]}, "host is a list, not a text or null"),
    ],
)
def test_malformed_origin_is_refused(changed: dict[str, object], problem: str, tmp_path: Path) -> None:
    data = json.loads(some("a").stamped().to_json())
    data["origin"] |= changed
    (tmp_path / "records.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_records(tmp_path)


def some(key: str) -> RunRecord:
    return RunRecord(key, RunConfig().to_dict(), "ok")


def test_appended_records_are_read_in_order(tmp_path: Path) -> None:
    for key in "abc":
        append_record(tmp_path, some(key))
    found, complaints = read_records(tmp_path)
    assert [r.key for r in found] == ["a", "b", "c"]
    assert complaints == []


def test_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    append_record(tmp_path, some("a"))
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes() + b'{"key": "b", "conf')
    found, complaints = read_records(tmp_path)
    assert [r.key for r in found] == ["a"]
    assert "records.jsonl:2 is incomplete" in complaints[0]
    append_record(tmp_path, some("c"))  # starts a new line
    found, complaints = read_records(tmp_path)
    assert [r.key for r in found] == ["a", "c"]
    assert len(complaints) == 1


@pytest.mark.parametrize(("line", "problem"), [(b"[" * 100_000, "nested too deeply"), (b"7", "no JSON object")])
def test_line_other_than_a_json_object_is_skipped_alone(tmp_path: Path, line: bytes, problem: str) -> None:
    append_record(tmp_path, some("a"))
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes() + line + b"\n")
    append_record(tmp_path, some("b"))
    found, complaints = read_records(tmp_path)
    assert [r.key for r in found] == ["a", "b"]
    assert complaints == [f"{file}:2 is not a record of cs_systems ({problem}); skipped"]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"hello", "damaged at column 1"),
        (b'{"key": oops, "repeat": 1}', "damaged at column 9"),
        (b'{"key": "\xe9"}', "damaged"),
        (b'{"key": "b", "conf', "incomplete (the run was interrupted while writing it)"),
        (b'{"key": "b", "repeat": 1', "incomplete (the run was interrupted while writing it)"),
        (b'{"key": "b", "config": {"a": 1}', "incomplete (the run was interrupted while writing it)"),
        (b"\0" * 9, "incomplete (the run was interrupted while writing it)"),
    ],
)
def test_damaged_line_is_not_called_incomplete(tmp_path: Path, line: bytes, cause: str) -> None:
    file = tmp_path / "records.jsonl"
    file.write_bytes(line + b"\n")
    append_record(tmp_path, some("a"))
    assert read_records(tmp_path)[1] == [f"{file}:1 is {cause}; skipped"]


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (SCHEMA_VERSION + 1, "upgrade cs-systems"),
        (SCHEMA_VERSION - 1, "migrate it by scripts/migrate_records.py of the source code, or measure again"),
    ],
)
def test_another_schema_is_refused(tmp_path: Path, version: int, remedy: str) -> None:
    line = json.loads(some("a").to_json()) | {"schema_version": version}
    (tmp_path / "records.jsonl").write_text(json.dumps(line) + "\n")
    complaint = f"records.jsonl:1: the record has schema {version}, but this version of cs-systems reads schema "
    with pytest.raises(ConfigError, match=f"{complaint}{SCHEMA_VERSION}; {re.escape(remedy)}"):
        read_records(tmp_path)


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"a": 1}\n', '{"schema_version": 1}\n', "[" * 100_000])
def test_lines_other_than_records_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.jsonl"):
        read_records(file)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; give the folder"):
        read_records(tmp_path / "nowhere")


def test_key_depends_on_machine_and_code() -> None:
    from dataclasses import replace

    config = RunConfig()
    changed = [
        make_key(config, 0, ENVIRONMENT),
        make_key(config, 1, ENVIRONMENT),
        make_key(RunConfig(seed=1), 0, ENVIRONMENT),
        *(make_key(config, 0, replace(ENVIRONMENT, **{f: "other"})) for f in ("torch", "device_name", "code_version")),
    ]
    assert len(set(changed)) == len(changed)
    assert make_key(config, 0, replace(ENVIRONMENT, power_w=300.0)) == changed[0]


def test_key_depends_on_user_code(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    config = RunConfig(attention=f"{source}:attend")
    keys = []
    for text in ("attend = 1", "attend = 2", "attend = 1"):
        source.write_text(text)
        keys.append(make_key(config, 0, ENVIRONMENT))
    assert keys[0] == keys[2] != keys[1]


def test_config_of_a_later_version_is_refused_with_its_reason() -> None:
    later = RunRecord("k", RunConfig().to_dict() | {"of_later": 1, "other": 2}, "ok")
    with pytest.raises(
        ConfigError,
        match=r"^the record with key k has a config .* \(RunConfig has no field 'of_later'\); use the version that",
    ):
        _ = later.run_config


def test_measurement_has_steps_and_phases() -> None:
    def sample(warmup: bool, wall: float) -> Sample:
        return Sample(0, warmup, wall, {"forward": wall / 4}, {"forward": wall / 8})

    measurement = Measurement("monotonic", (sample(True, 9.0), sample(False, 1.0), sample(False, 2.0)), 0.1)
    assert measurement.durations_s("step") == [1.0, 2.0]
    assert measurement.durations_s("forward") == [0.25, 0.5]
    assert measurement.phase_names() == ("forward",)


@pytest.mark.parametrize(
    "damage",
    [
        {"later": 3},
        {"measurement": {"clock": "monotonic", "setup_s": 0.0, "samples": {"round": [0, 0], "warmup": [False]}}},
        {"environment": {"unheard_of": 1}},
        {"warnings": [3]},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_line_of_another_version_is_refused_with_remedy(damage: dict[str, object], tmp_path: Path) -> None:
    append_record(tmp_path, some("a"))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(json.dumps(json.loads(some("b").to_json()) | damage) + "\n")
    with pytest.raises(ConfigError, match=r"records.jsonl:2 is not a record of this version \(.+\); read it with"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda data: data | {"later": 3}, "it has an unknown field 'later'"),
        (lambda data: {name: value for name, value in data.items() if name != "config"}, "it lacks 'config'"),
        (
            lambda data: (
                data
                | {
                    "measurement": {
                        "clock": "monotonic",
                        "setup_s": 0.0,
                        "samples": {"round": [0, 0], "warmup": [False]},
                    }
                }
            ),
            "the columns of its samples differ in length",
        ),
    ],
    ids=["unknown", "lacking", "samples"],
)
def test_missing_parts_of_a_record_are_described(
    changed: Callable[[dict[str, Any]], dict[str, Any]], words: str, tmp_path: Path
) -> None:
    (tmp_path / "records.jsonl").write_text(json.dumps(changed(json.loads(some("a").to_json()))) + "\n")
    with pytest.raises(ConfigError, match=re.escape(f"records.jsonl:1 is not a record of this version ({words})")):
        read_records(tmp_path)
