"""Reports of ncu: rows made from NVIDIA's objects, invalid files, and a report of one H200."""

from __future__ import annotations

import gzip
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.core import formats
from cs_systems.readers import ncu

RECORDED = Path(__file__).parents[1] / "data" / "h200_flash_triton.ncu-rep.gz"


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `analyze` read reports in this process instead of a separate one."""
    monkeypatch.setattr(formats, "formats", lambda: (replace(ncu.FORMAT, read=ncu.rows),))


STACK = ("step", "forward", "block 0", "attention", "scores")


@dataclass
class Metric:
    number: float | str | None
    written: str = ""

    def value(self) -> float | str | None:
        return self.number

    def unit(self) -> str:
        return self.written


class Range:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class Domain:
    """Domain that sorts its range names, as ncu-report documents, and also gives them by their place in the stack."""

    def push_pop_ranges(self) -> tuple[str, ...]:
        return tuple(sorted(STACK))

    def push_pop_range(self, index: int) -> Range:
        return Range(STACK[index])


class State:
    def domains(self) -> tuple[int, ...]:
        return (7,)

    def domain_by_id(self, number: int) -> Domain:
        assert number == 7
        return Domain()


@dataclass
class Action:
    """Profiled launch, with the attributes that the reader uses."""

    NameBase_DEMANGLED: ClassVar[int] = 1
    metrics: dict[str, Metric] = field(default_factory=dict)
    state: State | None = None

    def name(self, base: int) -> str:
        assert base == self.NameBase_DEMANGLED
        return "gemm<128>(float *)"

    def metric_by_name(self, name: str) -> Metric | None:
        return self.metrics.get(name)

    def nvtx_state(self) -> State | None:
        return self.state


def row(monkeypatch: pytest.MonkeyPatch, folder: Path, action: Action) -> ncu.Row:
    monkeypatch.setattr(ncu, "_loader", lambda: lambda path: [[action]])
    (folder / "a.ncu-rep").touch()
    (found,) = ncu.rows(folder / "a.ncu-rep")
    return found


@pytest.mark.parametrize(
    ("column", "metric", "expected"),
    [
        ("time_s", Metric(239008.0, "ns"), 239008e-9),
        ("time_s", Metric(239.0, "usecond"), 239e-6),
        ("occupancy_share", Metric(74.5, "%"), 0.745),
        ("dram_read_bytes_per_s", Metric(1.05e11, "byte/s"), 1.05e11),
        ("registers", Metric(16.0, "register/thread"), 16),
        ("warp_efficiency_share", Metric(24.0, ""), 0.75),
        ("shared_load_bytes_per_s", Metric(1e9, "1/s"), 128e9),
        ("shared_load_conflicts", Metric(3.0, ""), 3),
        ("sm_share", Metric(None, "%"), None),
        ("sm_share", Metric("n/a", "%"), None),
        ("sm_share", None, None),
    ],
)
def test_metrics_are_converted_to_base_units_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, column: str, metric: Metric | None, expected: float | None
) -> None:
    found = row(monkeypatch, tmp_path, Action({ncu.METRICS[column]: metric} if metric else {}))
    assert found[column] == (None if expected is None else pytest.approx(expected))
    assert [name for name in ncu.METRICS if found[name] is not None] == ([] if expected is None else [column])


def test_row_has_kernel_and_ranges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grid = {f"launch__grid_dim_{axis}": Metric(number) for axis, number in zip("xyz", (132.0, 2.0, 1.0), strict=True)}
    found = row(monkeypatch, tmp_path, Action(grid, State()))
    assert (found["kernel"], found["grid"], found["block"]) == ("gemm<128>(float *)", "132×2×1", None)
    assert found["ranges"] == "step > forward > block 0 > attention > scores"
    assert row(monkeypatch, tmp_path, Action())["ranges"] == ""


def test_text_is_three_tables_of_80_columns_and_csv_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {name: Metric(1e12 if column.endswith("_s") else 99.9) for column, name in ncu.METRICS.items()}
    row(monkeypatch, tmp_path, Action(metrics, State()))
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "a.ncu-rep"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for text in (
        "a.ncu-rep · ncu · 1 kernels",
        "do not use these times as timings",
        "warp eff.",
        "ld conflicts",
        "scores",
    ):
        assert text in shown.replace("\n", " ")
    assert main(["analyze", "a.ncu-rep", "--format", "csv"]) == 0
    header, line = capsys.readouterr().out.strip().splitlines()
    assert header.split(",")[:4] == ["kernel", "ranges", "grid", "block"]
    assert line.startswith("gemm<128>(float *),step > forward")
    assert main(["analyze", "a.ncu-rep", "--table", "kernels"]) == 2
    shown = "{} cannot be used with a.ncu-rep, which contains counters of kernels; use only --format (not html) and --"
    assert shown.format("--table") in capsys.readouterr().err
    assert main(["analyze", "a.ncu-rep", "--top", "3", "--format", "html", "--output", "page.html"]) == 2
    assert shown.format("--top --format html") in capsys.readouterr().err


def test_table_without_a_metric_is_left_out_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row(monkeypatch, tmp_path, Action({ncu.METRICS["registers"]: Metric(16.0)}))
    in_this_process(monkeypatch)
    assert main(["analyze", str(tmp_path / "a.ncu-rep")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no metric of occupancy and efficiency, throughput was recorded; record with ncu --set full" in shown
    assert "shared memory" in shown
    assert "SM eff." not in shown


@pytest.mark.ncu_report
@pytest.mark.parametrize("content", [b"", b"no report", b"NVR\0\xff\xff\xff\x7f" * 9])
def test_invalid_report_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ncu-rep").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*a.ncu-rep|a.ncu-rep (is empty|holds no profiled kernel)"):
        ncu.read(tmp_path / "a.ncu-rep")
    with pytest.raises(ConfigError, match=r"b.ncu-rep does not exist"):
        ncu.read(tmp_path / "b.ncu-rep")


def test_missing_package_is_named_with_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    (tmp_path / "a.ncu-rep").touch()
    with pytest.raises(
        ConfigError, match=r"requires NVIDIA's package ncu-report .*; run pip install 'cs-systems\[ncu\]'"
    ):
        ncu.rows(tmp_path / "a.ncu-rep")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
            r"was ended by SIGSEGV on .*a.ncu-rep; install its",
        ),
        ("", r"cannot read .*a.ncu-rep: AttributeError: .*; install its newest version: pip install --upgrade"),
        (
            "def load_report(path): raise OSError('one\\ntwo')",
            r"(?s)cannot read .*a.ncu-rep: one\ntwo; use an ncu-report",
        ),
    ],
)
def test_crash_of_ncu_report_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, message: str
) -> None:
    """The package of ncu 2025.3.1 crashed with a segmentation fault under Python 3.12, in the parent of a sweep."""
    (tmp_path / "ncu_report.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "a.ncu-rep").write_bytes(b"NVR\0")
    with pytest.raises(ConfigError, match=message):
        ncu.read(tmp_path / "a.ncu-rep")


@pytest.mark.ncu_report
def test_h200_report_has_every_column(tmp_path: Path) -> None:
    """The report has three kernels of flash_triton in a step of `small` with two layers, bf16."""
    report = tmp_path / "h200.ncu-rep"
    report.write_bytes(gzip.decompress(RECORDED.read_bytes()))
    rows = ncu.read(report)
    assert [row["kernel"] for row in rows] == ["flash_forward_kernel", "flash_forward_kernel", "flash_dq_kernel"]
    assert [row["ranges"].split(" > ")[-2:] for row in rows] == [[f"block {n}", "attention"] for n in (0, 1, 1)]
    for found in rows:
        assert [column for column, value in found.items() if value is None] == []
        assert 0 < found["time_s"] < 0.01
        shares = [value for column, value in found.items() if column.endswith("_share")]
        assert all(0 <= share <= 1 for share in shares)
        assert found["occupancy_share"] <= found["highest_occupancy_share"]
        assert found["warp_efficiency_share"] == 1
