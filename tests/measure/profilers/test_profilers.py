"""Tests of the contract of every profiler: its hooks, its own worker, and times that do not count as timings."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import cs_systems
from cs_systems.analysis.comparison.runs import compare
from cs_systems.cli import main
from cs_systems.cli.profile import print_profile
from cs_systems.config import FIELDS, PRESETS, ConfigError, Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.measure.profilers import ProfileLost, Profiler
from cs_systems.measure.runtime import profiled as profiling
from cs_systems.measure.workloads import Cell
from cs_systems.record import RunRecord, measured_by, read_records
from tests import forks

TINY = RunConfig(model=PRESETS["tiny"], batch_size=2, device="cpu", warmup=1, steps=3)
PHASES = ["forward", "loss", "backward", "optimizer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure a cell without a profiler and the same cell under Kineto."""
    folder = tmp_path_factory.mktemp("profile")
    for _ in cs_systems.sweep([TINY, replace(TINY, profiler="kineto")], out=folder, interleave=True):
        pass
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> list[RunRecord]:
    return read_records(folder)[0]


@pytest.mark.parametrize("name", plugins.names("profilers"))
def test_profiler_exports_its_parts_without_torch(name: str) -> None:
    profiler = plugins.get("profilers", name)
    assert isinstance(profiler, Profiler)
    assert measured_by(name) == profiler.measures
    program = (
        f"import sys; from cs_systems.core import plugins; p = plugins.get('profilers', {name!r}); p.problem(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


LEAVES_NOTHING = {
    "dtypes": "the dtypes were not written; check the free disk space",
    "kineto": "torch.profiler left no trace; check the free disk space",
    "memory": "the readings of memory were not written; check the free disk space",
    "memory_snapshot": "PyTorch left no snapshot; check the free disk space",
    "ncu": "ncu wrote neither a report nor a message; run ncu yourself, with the command that "
    "cs-systems profile --with ncu --kernel REGEX --show-command prints",
    "nsys": "nsys left no report; read its messages in worker.log, next to the records",
    "nsys_memory": "nsys left no report; read its messages in worker.log, next to the records",
    "overlap": "the trace of rank 0 is not in the output folder; check the free disk space, and if the ranks run "
    "on several nodes, choose a folder that all nodes share",
    "precision_error": "the profiler precision_error measures only a model of your own; set workload to "
    "path.py:name, or, for the built-in model, set workload to precision_error and leave out profiler",
    "rank_memory": "the readings of memory of rank 0 are not in the output folder; check the free disk space, and if "
    "the ranks run on several nodes, choose a folder that all nodes share",
    "residuals": "the list of saved tensors was not written; check the free disk space",
}


@pytest.mark.parametrize("name", plugins.names("profilers"))
def test_profiler_declares_fields_and_tools_that_exist(name: str) -> None:
    from cs_systems.measure.recorder.own_tools import TOOLS

    profiler: Profiler = plugins.get("profilers", name)
    assert profiler.checks <= {*FIELDS}
    assert profiler.tool is None or profiler.tool in TOOLS
    assert profiler.measures in ("time", "memory", "values", "counters")


@pytest.mark.parametrize("name", [name for name in plugins.names("profilers") if name != "none"])
def test_missing_output_raises_profile_lost(name: str, tmp_path: Path) -> None:
    record = RunRecord("key", replace(TINY, profiler=name).to_dict(), "ok")
    with pytest.raises(ProfileLost, match=f"^{re.escape(LEAVES_NOTHING[name])}$"):
        plugins.get("profilers", name).collect(tmp_path / "cell", record)


def test_profiled_cell_is_marked_and_keeps_its_trace(folder: Path, records: list[RunRecord]) -> None:
    clean, profiled = records
    assert [r.status for r in records] == ["ok", "ok"]
    assert "profiled" not in [w.code for w in clean.warnings]
    caveat = next(w for w in profiled.warnings if w.code == "profiled")
    assert caveat.message == "measured under kineto; the times include the profiler's overhead"
    assert "cs-systems time" in caveat.remedy
    assert clean.key != profiled.key
    assert clean.artifacts == {}
    name = f"tiny-ctx-64-batch-2-naive-fp32-train-step-{replace(TINY, profiler='kineto').key()[:8]}-0"
    assert profiled.artifacts == {"trace": f"{name}.trace.json.gz", "page": f"{name}.html"}
    assert all((folder / file).is_file() for file in profiled.artifacts.values())
    assert profiled.run_config.profiler == "kineto"


def test_trace_excludes_warm_up(folder: Path, records: list[RunRecord]) -> None:
    trace = json.loads(gzip.decompress((folder / records[1].artifacts["trace"]).read_bytes()))
    names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    assert names.count("step") == TINY.steps
    for phase in ("forward", "backward", "optimizer"):
        assert names.count(phase) == TINY.steps
    assert names.count("block 0") == names.count("block 1") == 2 * TINY.steps  # forward and backward
    assert names.count("softmax") == 2 * TINY.model.num_layers * TINY.steps


def test_trace_without_kernels_is_kept_with_host_times(
    records: list[RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    caveat = next(w for w in records[1].warnings if w.code == "no-tables")
    assert "holds no kernel" in caveat.message
    file = Path(caveat.remedy.partition("cs-systems analyze ")[2])
    assert file.is_file()
    assert file.name == records[1].artifacts["trace"]
    assert "kernels" not in records[1].results
    assert {("forward", "block 0"), ("backward", "block 0"), ("optimizer", "optimizer")} <= {
        (row["phase"], row["range"]) for row in records[1].results["ranges"]
    }
    print_profile(records[1], Path("runs"))
    assert f"The tables are means over all {TINY.steps} steps\nranges by CPU time, per step" in capsys.readouterr().out


def test_forward_alone_has_no_ratio_to_backward(capsys: pytest.CaptureFixture[str]) -> None:
    """A table without rows is not printed."""
    folder = Path(__file__).parents[3] / "profiles" / "course" / "nsys_profile" / "forward"
    (record,) = (each for each in read_records(folder)[0] if each.run_config.profiler == "nsys")
    print_profile(record, folder)
    printed = capsys.readouterr().out
    assert "phases by kernel family, per step" in printed
    assert "no data" not in printed
    assert "backward time : forward time" not in printed


def test_profiled_times_are_not_compared(records: list[RunRecord]) -> None:
    clean, profiled = records
    found = compare([clean, profiled], [clean])
    assert len(found.rows) == 1
    assert found.doubts[0] == "left out: 1 record of the baseline timed under a profiler"
    with pytest.raises(ConfigError, match="the baseline has no cell timed without a profiler; measure it"):
        compare([profiled], [clean])


def test_profiler_keeps_old_keys_and_round_trips_json() -> None:
    profiled = replace(TINY, profiler="nsys", profiler_args=("--gpu-metrics-device=0",))
    assert RunConfig.from_dict(json.loads(json.dumps(profiled.to_dict()))) == profiled
    assert len({TINY.key(), profiled.key(), replace(profiled, profiler_args=()).key()}) == 3


def test_unprofilable_request_is_refused_before_running(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="rounds is 2, but a profile covers one round; leave out rounds"):
        replace(TINY, profiler="kineto", rounds=2)
    with pytest.raises(ConfigError, match="profiler kineto needs its own process; leave out in_process=True"):
        cs_systems.run(replace(TINY, profiler="kineto"), in_process=True)
    with pytest.raises(ConfigError, match="unknown profiler 'kinto'; did you mean kineto"):
        next(iter(cs_systems.sweep([replace(TINY, profiler="kinto")])))
    assert main(["profile", "--with", "kineto", "--size", "tiny", "--nsys-arg=--stats=true"]) == 2
    assert "--nsys-arg requires --with nsys, got --with kineto" in capsys.readouterr().err


@pytest.mark.parametrize(("precision", "message", "status"), [("fp32", "ok", 0), ("tf32", "unavailable: ", 1)])
def test_show_command_output_measures_the_cell(precision: str, message: str, status: int, tmp_path: Path) -> None:
    """--show-command prints a command with one request as an argument, for use under the user's own profiler."""
    config = replace(TINY, profiler="kineto", precision=Precision(precision))
    _, *words = profiling.command(Cell(config), tmp_path / "mine", on_cuda=False)
    done = forks.python(*words)
    assert (done.stdout.startswith(message), done.returncode) == (True, status), done.stderr
    assert [file.name for file in tmp_path.iterdir()] == (["mine.trace.json.gz"] if status == 0 else [])


def test_profile_without_out_folder_keeps_tables_and_removes_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record = cs_systems.run(replace(TINY, profiler="kineto", steps=1))
    assert (record.status, record.artifacts) == ("ok", {})
    assert list(tmp_path.rglob("*.trace.json.gz")) == []


def test_unavailable_cell_keeps_its_status(tmp_path: Path) -> None:
    (record,) = cs_systems.sweep([replace(TINY, profiler="kineto", precision=Precision.TF32)], out=tmp_path)
    assert (record.status, record.artifacts) == ("unavailable", {})
