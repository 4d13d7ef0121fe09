"""Absurd option values and pairs of options give a result or an error message, never a traceback."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cs_systems.advise import cells
from cs_systems.cli import COMMANDS, _course, _sweep, main
from cs_systems.cli._options import ModelCells, Steps, of_each
from cs_systems.cli.schema import DOCUMENT, schema
from cs_systems.config import ConfigError, RunConfig
from cs_systems.measure.runtime.sweep import check
from cs_systems.record import Row, append_record
from cs_systems.report.tables.document import MOST_BYTES
from tests.advise.test_search import CPU
from tests.report.conftest import ok, train_config

ABSURD = ("0", "-1", "1e308", "nan", str(10**30), "9" * 4999, "", "\n", "a\0b", "x" * 4999, "²", "\x1b[31mred")
TINY = ("--size", "tiny", "--dry-run")
REQUIRED = {
    **dict.fromkeys(("advise", "time", "memory", "parallel", "precision"), TINY),
    **dict.fromkeys(("attention", "comm"), ("--dry-run",)),
    "profile": ("--with", "kineto", *TINY),
    "report": ("RUN",),
    "compare": ("RUN", "RUN"),
    "analyze": ("RUN/records.jsonl",),
    "snapshot": ("RUN/records.jsonl",),
    "doctor": (),
    "schema": (),
    "mcp": ("no_such_folder",),
    "ab": ("true", "true", "--dry-run"),
    "course": ("naive_ddp", "--dry-run"),
    "run": (),
}
VALID = {
    "attention": "naive", "mode": "forward", "precision": "bf16", "compile": "default", "checkpoint": "every:1",
    "optimizer": "adamw", "memory_limit": "8GiB", "part": "0/2", "workload": "train_step", "device": "cpu",
    "causal": "true", "align": "lower_right", "l2": "clear", "collective": "broadcast", "size": "tiny", "dtype": "bf16",
    "strategy": "ddp_naive", "with": "overlap", "format": "csv", "columns": "size", "pivot": "size:attention:median_ms",
    "phase": "forward", "figure_kind": "phases", "table": "phases", "range": "step", "fits": "24GiB",
    "budget": "40GiB", "allocator": "expandable_segments", "model": "toy", "show": "RUN",
    "kernel": "gemm", "nsys_arg": "--x", "ncu_arg": "--x",
}  # fmt: skip
FILES = {"out": "RUN/new", "output": "RUN/table", "figure": "RUN/figure.svg"}


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a dry run list its cells without the process that would predict their memory."""

    def predicted(configs: Sequence[RunConfig], *, timeout_s: float | None = None) -> list[Row]:
        check(configs, timeout_s=timeout_s)
        return [{"reason": None, "predicted_peak_bytes": 10**30, "device_memory_bytes": 1} for _ in configs]

    monkeypatch.setattr(_sweep, "preflight", predicted)
    monkeypatch.setattr(cells, "machine", lambda device: CPU)
    monkeypatch.setattr(_course, "machine", lambda: _course.Machine(0, None))
    monkeypatch.chdir(tmp_path)
    Path("RUN").mkdir()
    append_record("RUN", ok(train_config("small"), 0.01, 1e12, 10**9))


def options(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield each option that a command's dataclass makes, nested ones too, with its default."""
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if dataclasses.is_dataclass(default):
            yield from options(type(default))
        elif field.name not in ("files", "dir", "a", "b", "dry_run"):
            yield field.name.rstrip("_"), default


def of_command(command: str) -> list[tuple[str, Any]]:
    return [*options(importlib.import_module(f"cs_systems.cli.{command}").ARGS)]


def status(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Return a command's exit status; check that its output is printable and that an error has a message."""
    try:
        code = main(words)
    except SystemExit as left:  # raised by the parser of options
        code = int(left.code or 0)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert code in (0, 2, 3), words
    assert code != 2 or err.strip(), f"{words} is refused without a message"
    return code


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "doctor"])
def test_absurd_values_never_end_in_a_traceback(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (name, default) in enumerate(of_command(command)):
        if isinstance(default, bool):
            continue
        for value in random.Random(number).sample(ABSURD, 2):
            status([command, *REQUIRED[command], f"--{name.replace('_', '-')}={value}"], capsys)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "doctor"])  # whose rows test_doctor reads
def test_every_command_writes_one_document_or_says_why_not(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    has_option = "format" in dict(of_command(command))
    # schema prints JSON in any case; the standard output of mcp has the messages of the protocol
    assert has_option != (command in ("schema", "mcp"))
    if has_option:
        code = main([command, *REQUIRED[command], "--format", "json"])
        out, err = capsys.readouterr()
        text = err.splitlines()[-1] if command == "run" else out  # standard output is the script's
        found = json.loads(text)
        Draft202012Validator(schema(DOCUMENT)).validate(found)
        assert len(text.encode()) <= MOST_BYTES
        assert code == found.get("error", {"status": 0})["status"]
        assert "error" in found or found["tables"] or found["notes"]


@pytest.mark.parametrize("option", ["batch-size", "context-length", "num-layers", "steps", "memory-limit", "timeout-s"])
@pytest.mark.parametrize("value", ABSURD)
def test_absurd_numbers_never_break_a_dry_run(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {("steps", "0"), ("batch-size", "0"), ("num-layers", "0"), ("timeout-s", "nan"), ("timeout-s", "1e308")}
    code = status(["time", *TINY, f"--{option}={value}"], capsys)
    assert code == 2 or (option, value) not in expected


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "doctor"])
def test_pairs_of_options_are_applied_or_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    def words(name: str, default: Any) -> list[str]:
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            return [option]
        return [f"{option}={FILES.get(name) or VALID.get(name, '2')}"]

    pairs = [*combinations(of_command(command), 2)]
    for left, right in random.Random(0).sample(pairs, min(25, len(pairs))):
        if "best_checkpoint" in (left[0], right[0]):  # this option starts a worker
            continue
        status([command, *REQUIRED[command], *words(*left), *words(*right)], capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("report RUN --columns size --pivot size:attention:median_ms", "leave out --columns or --pivot"),
        ("report RUN --figure-kind phases", "--figure-kind requires --figure"),
        ("report RUN --format html --pivot=", "leave out --columns, --pivot and --phase"),
        ("memory --fits 24GiB --steps 5", "--fits predicts memory without measuring a step; leave out --steps"),
        ("profile --with nsys --show-command --fresh", "prints the commands and runs nothing; leave out --fresh"),
        ("profile --with kineto --kernel=", "--kernel requires --with ncu, got --with kineto"),
        (
            "analyze x --table phases --top 3",
            "--top shortens only the tables steps, kernels, layers, host_gaps, waits, ranges, range_tree, operators, "
            "modules, and not",
        ),
        (
            "snapshot x --table composition --top 3",
            "--top shortens only the tables top, timeline, annotations, out_of_memory, segments, alive, and not",
        ),
        ("snapshot x y --size=", "--size names the tensors of one snapshot, and two were given; leave out --size"),
        (
            "time --size tiny --d-model 63 --num-heads 10",
            "63 is not divisible by --num-heads 10; choose a --d-model that is a multiple of 20",
        ),
        (f"time --d-model {10**18} --num-heads 3", "choose --num-heads among 1, 2, 4"),
        (f"attention --heads {3 * 10**17} --heads-kv 7", "choose --heads-kv among 2, 3, 4, 5, 6, 8, 10, 12"),
        ("time --num-layers 99999", "--num-layers is 99999; it must be at most 10,000"),
        ("time --out a\0b", "'a\\x00b' contains a NUL character; remove it"),
        (f"time --memory-limit {'9' * 400}GiB", "is not a size in bytes"),
    ],
)
def test_option_without_effect_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split(" ")) == 2
    assert message in capsys.readouterr().err


def test_several_warmups_stand_next_to_each_other_in_every_cell_of_time_and_attention() -> None:
    ways = Steps(warmup=(0, 5))
    found = of_each(ways, lambda steps: ModelCells(size=("small", "medium")).configs(steps.base()))
    assert [(c.model.name, c.warmup) for c in found] == [("small", 0), ("small", 5), ("medium", 0), ("medium", 5)]
    with pytest.raises(ConfigError, match=r"--warmup takes one value in this command, got 0 5; give one of them"):
        ways.base()
