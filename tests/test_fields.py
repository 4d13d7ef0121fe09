"""A field of the configuration is declared once: a declaration added to a copy of the package is found everywhere."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_systems.config import FIELDS, LEAVES, ConfigError, RunConfig, preset
from cs_systems.core.fields import Subject

PACKAGE = Path(__file__).parents[1] / "cs_systems"
DECLARATION = """
    lookahead: Annotated[
        int | None,
        Field(
            "batches read", frozenset({Subject.STEP}),
            takes="many", heading="ahead", words="{} ahead", axis=7, least=1,
        ),
    ] = None
    replays: Annotated[
        int,
        Field(
            "replays of the graph in a step", frozenset({Subject.STEP}),
            takes="one", part_of="graph", counts="replay", least=1,
        ),
    ] = 1
"""
PROGRAM = """
import json
from cs_systems.analysis.comparison.runs import compare
from cs_systems.cli._options import described
from cs_systems.cli.attention import AttentionCells
from cs_systems.cli.time import ModelCells, Time
from cs_systems.config import ConfigError, RunConfig, describe, grid
from cs_systems.record import Measurement, RunRecord, Sample
from cs_systems.report.figures.labels import LENGTHS, labels
from cs_systems.report.frame import frame
from cs_systems.report.tables.records import render

plain, ahead = RunConfig(), RunConfig(lookahead=2)
assert ahead.key() != plain.key() == "44136fa355b3678a", "a new field keeps the keys of cells that do not set it"
assert RunConfig.from_dict(json.loads(json.dumps(ahead.to_dict()))) == ahead
assert describe(ahead) == f"{describe(plain)} · 2 ahead"
assert ModelCells(lookahead=(2, 3)).configs(plain) == grid(lookahead=[2, 3])
names = {kind: {name for each in described(kind) for name in each.names} for kind in (Time, AttentionCells)}
assert "lookahead" in names[Time] and "lookahead" not in names[AttentionCells]
sample = Sample(0, False, 0.1, {}, {})
records = [
    RunRecord(str(number), config.to_dict(), "ok", measurement=Measurement("monotonic", (sample, sample), 0.0))
    for number, config in enumerate((plain, ahead))
]
assert frame(records)["lookahead"].tolist()[1] == 2
assert "ahead" in render(records).splitlines()[3].split(), render(records)
assert compare(records[:1], records[1:]).compared == {"lookahead": (None, 2)}
for workload in ("training_curve", "precision_error", "toy", "collective", "accumulation", "x:y", "live x", "loop x"):
    try:
        RunConfig(workload=workload, lookahead=2)
    except ConfigError as error:
        expected = f"lookahead applies only to train_step, and the workload is {workload}; leave out lookahead"
        assert str(error) == expected, error
        assert error.with_options().endswith("leave out --lookahead")
    else:
        raise AssertionError(workload)
try:
    RunConfig(lookahead=0)
except ConfigError as error:
    assert str(error) == "lookahead is 0; it must be at least 1"
try:
    RunConfig(replays=2)
except ConfigError as error:
    assert str(error) == "replays 2 has no effect while graph is none; set graph, or leave out replays"
    assert error.with_options().endswith("set --graph, or leave out --replays")
else:
    raise AssertionError("a field was accepted that has no effect without the field that it belongs to")
assert frame([RunRecord("2", RunConfig(graph="step", replays=2).to_dict(), "ok")])["replays"].tolist() == [2]
assert LENGTHS[-1] == "lookahead", "a curve runs along it if no other size varies"
cells = frame([RunRecord("3", RunConfig(lookahead=3, graph="step", replays=2).to_dict(), "ok")])
assert labels(cells, ["lookahead", "replays"]) == ["ahead 3 · 2 replays"]
"""
# Literals that hold names of fields in another sense.
ALLOWED = {
    "analysis/attribution/kernel_families.py": "families of kernels",
    "report/palette.py": "families of kernels",
    "analysis/attribution/timeline.py": "panels of a page",
    "cli/_options.py": "sizes of a model that make its attention call",
    "cli/profile.py": "tables of a trace",
    "analysis/comparison/precision.py": "what the caption of a comparison leaves out",
    "report/collectives.py": "columns of fits and of set-up times",
    "cli/run.py": "options of a recorded loop",
    "config.py": "words of an attention call and what they mean for a training step",
    "core/recipes.py": "values of a recipe",
    "instrument/memory_readings.py": "columns of a tensor",
    "measure/recorder/calls.py": "columns of the calls of a model",
    "measure/recorder/replicas.py": "columns of what a rank trains",
    "measure/recorder/training.py": "columns of what a loop trains",
    "measure/runtime/object_state.py": "parts of a training setup",
    "measure/runtime/sweep.py": "arguments of run, which are fields or objects",
    "measure/workloads/_module.py": "results that a workload reports",
    "measure/workloads/attention.py": "results that a workload reports",
    "measure/workloads/train_step.py": "results that a workload reports",
}


def test_added_field_is_found_everywhere_or_refused(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "cs_systems", ignore=shutil.ignore_patterns("__pycache__"))
    config = tmp_path / "cs_systems" / "config.py"
    before, after = config.read_text().split("    strategy: Annotated[", 1)
    config.write_text(f"{before}{DECLARATION[1:]}    strategy: Annotated[{after}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_other_file_lists_names_of_fields() -> None:
    """A literal of three names or more would be one more place to edit for a new field."""
    found = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if any(_lists(file.read_text()))}
    assert found == ALLOWED.keys()


def _lists(text: str) -> Iterator[set[str]]:
    names = {each.name for each in LEAVES.values()} | FIELDS.keys()
    for node in ast.walk(ast.parse(text)):
        held = {*_texts(node)} & names
        words = node.value.split() if isinstance(node, ast.Constant) and isinstance(node.value, str) else ()
        if len(held) >= 3 or (len({*words} & names) >= 3 and {*words} <= names):
            yield held


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of a tuple, list, set or the keys of a dict, with those of literals that are unpacked in it."""
    elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
    for element in elements:
        if isinstance(element, ast.Starred):
            yield from _texts(element.value)
        elif isinstance(element, ast.Constant) and isinstance(element.value, str):
            yield element.value


NOT_DEFAULT = {
    "precision": "bf16", "mode": "forward", "compile": "default", "checkpoint": "every:1", "attention": "sdpa_flash",
    "graph": "step", "optimizer": "adamw", "strategy": "ddp_naive", "l2": "clear", "profiler": "kineto",
    "allocator": "expandable_segments", "device": "cpu", "inputs": "x:y", "compile_scope": "block",
    "clip_function": "x:y", "loss_function": "x:y", "data": "windows",
}  # fmt: skip
WORKLOADS = {
    Subject.OWN: "x:y", Subject.LOOP: "loop x", Subject.STUDY: "accumulation",
}  # fmt: skip


@pytest.mark.parametrize("subject", [subject for subject in Subject if subject is not Subject.MODEL])
def test_field_without_effect_on_the_subject_is_refused(subject: Subject) -> None:
    workload, base = WORKLOADS.get(subject, subject.value), {}
    if subject is Subject.ATTENTION:
        base = {"mode": "backward"}
    for name, each in FIELDS.items():
        if name == "workload" or subject in each.subjects:
            continue
        value = _value(name)
        with pytest.raises(ConfigError) as raised:
            RunConfig(**{**base, "workload": workload, name: value})  # type: ignore[arg-type]
        assert str(raised.value).startswith(name), "the message begins with the field"
        assert str(raised.value).partition("; leave out ")[2].startswith(name)


@pytest.mark.parametrize("name", [name for name, each in FIELDS.items() if each.field.part_of])
def test_field_without_effect_while_its_owner_has_the_default_is_refused(name: str) -> None:
    owner, value = FIELDS[name].field.part_of, _value(name)
    owned = {owner: WORKLOADS[Subject.OWN] if owner == "workload" else _value(owner), name: value}
    assert getattr(RunConfig(**owned), name) == value  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        RunConfig(**{name: value})  # type: ignore[arg-type]
    assert str(raised.value).startswith(name)
    assert str(raised.value).endswith(f"leave out {name}")


def _value(name: str) -> object:
    return NOT_DEFAULT.get(name) or _other(name)


def _other(name: str) -> object:
    """Return a value that is valid and not the default."""
    each = FIELDS[name]
    if each.kind is tuple:
        return (each.field.example,)
    if each.kind in (int, float):
        return each.kind(8)
    return True if each.kind is bool else each.kind() if each.default is None else each.kind(d_model=48)


def test_model_of_another_workload_is_refused_with_the_option_as_typed() -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig(workload="toy", model=preset("large"))
    assert str(refused.value).startswith("model applies only to train_step, ")
    assert str(refused.value).endswith(" and the workload is toy; leave out model")
    assert refused.value.with_options().startswith("--size applies only to train_step, ")
    assert refused.value.with_options().endswith(" and the workload is toy; leave out --size")
