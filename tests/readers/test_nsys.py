"""Tests of nsys exports: a real one, exports of other versions, and unusable ones."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.config import ConfigError
from cs_systems.readers import _nsys as nsys
from cs_systems.readers import read
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms.trace import Trace
from tests.recorded import MAIN

Export = Callable[..., Path]
KERNELS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"


def test_real_export_is_read_completely(nsys_trace: Trace) -> None:
    r = nsys_trace
    assert (len(r.kernels), len(r.copies), len(r.ranges), r.limitations) == (714, 24, 84, ())
    assert r.devices == {0: "NVIDIA H200"}
    assert [call.name for call in r.calls.where(stalls)] == ["cudaDeviceSynchronize_v3020"] * 3
    assert len({kernel.thread for kernel in r.kernels}) == 2  # the main and the autograd thread
    assert all(kernel.launch_start_s is not None and kernel.launch_start_s < kernel.start_s for kernel in r.kernels)
    assert [kernel.start_s for kernel in r.kernels] == sorted(kernel.start_s for kernel in r.kernels)


@pytest.mark.parametrize("chunk", [1, 7, 714, 715])
def test_result_does_not_depend_on_chunk_size(
    nsys_path: Path, nsys_trace: Trace, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(nsys, "CHUNK", chunk)
    trace = read(nsys_path)
    assert list(trace.kernels) == list(nsys_trace.kernels)
    assert list(trace.ranges) == list(nsys_trace.ranges)
    assert list(trace.copies) == list(nsys_trace.copies)
    assert list(trace.calls) == list(nsys_trace.calls)


def test_kernel_fields_match_the_export(export: Export) -> None:
    (kernel,) = read(export()).kernels
    assert kernel.function == ("gemm", (8, 4, 2), (128, 1, 1), 32, 124)
    assert (kernel.start_s, kernel.end_s) == pytest.approx((200e-9, 300e-9))
    assert (kernel.launch_start_s, kernel.launch_end_s) == pytest.approx((100e-9, 110e-9))
    assert (kernel.device, kernel.stream, kernel.thread, kernel.in_graph) == (0, 7, MAIN, False)


def test_reading_writes_no_file(nsys_path: Path) -> None:
    before = nsys_path.read_bytes()
    nsys_path.chmod(0o444)
    read(nsys_path)
    assert nsys_path.read_bytes() == before
    assert list(nsys_path.parent.iterdir()) == [nsys_path]


@pytest.mark.parametrize(
    "column", ["graphNodeId", "registersPerThread", "gridX", "staticSharedMemory", "streamId", "correlationId"]
)
def test_missing_column_gives_none(change: Callable[..., Path], column: str) -> None:
    trace = read(change(f"ALTER TABLE {KERNELS} DROP COLUMN {column}"))
    assert len(trace.kernels) == 714
    function = trace.kernels[0].function
    assert (function.registers is None) == (column == "registersPerThread")
    assert (function.grid is None) == (column == "gridX")
    assert (function.shared_bytes is None) == (column == "staticSharedMemory")
    assert (trace.kernels[0].launch_start_s is None) == (column == "correlationId")


@pytest.mark.parametrize("table", ["CUPTI_ACTIVITY_KIND_MEMCPY", "PROFILER_OVERHEAD", "TARGET_INFO_GPU"])
def test_missing_table_is_accepted(change: Callable[..., Path], table: str) -> None:
    assert len(profile(read(change(f"DROP TABLE {table}"))).steps) == 3


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            f"DROP TABLE {KERNELS}",
            r"holds no kernel, although it holds \d+ launches \(time of the CUDA calls: .* ms in cuda.*\), so probably "
            r"the GPU's profiling interface recorded none; stop other profilers \(ncu, DCGM\), and record with nsys",
        ),
        (f"DELETE FROM {KERNELS}", "holds no kernel, although it holds"),
        (f"UPDATE {KERNELS} SET start = 'soon'", "is a damaged export .*KERNEL has a text where a number belongs"),
        (f"UPDATE {KERNELS} SET globalPid = 'x'", "is a damaged export .*KERNEL has a text where a number belongs"),
        (f"UPDATE {KERNELS} SET start = '1,2'", "is a damaged export .*KERNEL has a text where a number belongs"),
        (
            f"UPDATE {KERNELS} SET correlationId = -1",
            "none of its 714 kernels was launched inside .*; choose other ranges as steps",
        ),
    ],
)
def test_unusable_export_is_refused_with_remedy(change: Callable[..., Path], statement: str, message: str) -> None:
    path = change(statement)
    if "-1" in statement:  # a kernel without a launch is attributed by its own start: move it before the first range
        path = change(f"UPDATE {KERNELS} SET correlationId = -1, start = 1, end = 2")
    with pytest.raises(ConfigError, match=message):
        profile(read(path), "step")


def test_compressed_export_is_not_called_damaged() -> None:
    path = Path(__file__).parents[1] / "data" / "nsys_h200_step.sqlite.gz"
    with pytest.raises(ConfigError, match=f"{path} is compressed; unpack it first"):
        read(path)


@pytest.mark.parametrize(
    ("statement", "note"),
    [
        ("DELETE FROM NVTX_EVENTS", "no range marks steps or phases: the whole recording counts as one step"),
        ("DROP TABLE NVTX_EVENTS", "no range marks steps"),
        ("UPDATE NVTX_EVENTS SET end = NULL", "without an end"),
        ("UPDATE NVTX_EVENTS SET eventType = 34", "no range marks steps"),
    ],
)
def test_export_without_ranges_is_one_step(change: Callable[..., Path], statement: str, note: str) -> None:
    made = profile(read(change(statement)))
    assert ([kernels.calls for kernels in made.by_step.values()], made.gaps.keys()) == ([714], {0})
    assert note in " ".join(made.notes)


def test_process_option_selects_one_of_two(export: Export) -> None:
    path = export(
        ranges=[("step", 0, 1000, MAIN), ("step", 0, 1000, (9 << 24) + 1)],
        launches=[(100, 110, MAIN, 1), (100, 110, (9 << 24) + 1, 1)],
        kernels=[("gemm", 200, 300, 1), ("softmax", 200, 300, 1, 9)],
    )
    first = read(path)
    assert [kernel.function.name for kernel in first.kernels] == ["gemm"]
    assert first.limitations[0] == (
        "the file holds several processes: 7 (1 kernel), 9 (1 kernel); process 7 is read, because it has the most "
        "kernels; --process reads another; if they are the ranks of a job, --ranks merges them"
    )
    with pytest.raises(ConfigError, match=r"no kernel of process 8"):
        read(path, process=8)
    trace = read(path, process=9)
    assert [kernel.function.name for kernel in trace.kernels] == ["softmax"]
    assert trace.kernels[0].thread == (9 << 24) + 1
    assert {r.thread for r in trace.ranges} == {(9 << 24) + 1}


@pytest.mark.parametrize(
    ("others", "note", "steps"),
    [
        ([9], "those of process 9 (1 range) count, by time alone", ["step"]),
        ([9, 11], "those of the processes 9 (1 range), 11 (1 range) do not count", ["recording"]),
    ],
)
def test_ranges_of_other_processes_are_used_or_noted(
    export: Export, others: list[int], note: str, steps: list[str]
) -> None:
    path = export(
        ranges=[("step", 0, 1000, (pid << 24) + 1) for pid in others],
        launches=[(100, 110, MAIN, 1)],
        kernels=[("gemm", 200, 300, 1)],
    )
    made = profile(read(path))
    assert note in " ".join(made.notes)
    assert [step.name for step in made.steps] == steps


def test_launches_before_the_recording_are_in_no_remedy(export: Export) -> None:
    path = export(kernels=[("early", 20, 30, None), ("gemm", 200, 300, 1)])
    with pytest.raises(
        ConfigError, match=r"between 5e-07 and 6e-07 s; choose .*: the launches are from 1e-07 to 1e-07 s"
    ):
        profile(read(path), between=(5e-7, 6e-7))


def test_recording_of_no_length_is_refused_as_damaged(export: Export) -> None:
    with pytest.raises(ConfigError, match="is damaged: its recording lasts 0 s; record again"):
        profile(read(export(ranges=[], launches=[], kernels=[("gemm", 200, 200, 1)])))


def test_lack_of_memory_is_not_reported_as_damage(nsys_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(nsys._Reader, "trace", fail)
    with pytest.raises(ConfigError, match=r"needs more memory than is free; use a machine with more memory"):
        read(nsys_path)


def test_unfinished_ranges_are_reported_and_left_out(export: Export) -> None:
    path = export(ranges=[("step", 0, 1000, MAIN), ("forward", 50, None, MAIN)])
    made = profile(read(path))
    assert made.phase_coverage == 0
    assert "left out: 1 range without an end ('forward')" in made.notes[0]
    with pytest.raises(
        ConfigError, match=r"no range is named 'step' \(.* without an end .'step'.*\); choose among 'other'"
    ):
        profile(read(export(ranges=[("other", 0, 1000, MAIN), ("step", 50, None, MAIN)])), "step")


def test_nested_launches_with_one_correlation_id_count_once(export: Export) -> None:
    """The runtime's call and the driver's call inside it may have the same correlation number."""
    path = export(launches=[(100, 150, MAIN, 1), (110, 140, MAIN, 1)])
    (kernel,) = read(path).kernels
    assert kernel.launch_end_s == pytest.approx(150e-9)


def test_graph_kernels_share_one_launch(export: Export) -> None:
    path = export(
        ranges=[("step", 0, 1000, MAIN), ("forward", 50, 900, MAIN)],
        kernels=[("gemm", 200 + 10 * n, 205 + 10 * n, 1, 7, 100 + n) for n in range(5)],
    )
    made = profile(read(path))
    assert [place.phase for place in made.places] == ["forward"] * 5
    assert "5 kernels ran in CUDA graphs" in made.notes[-1]


@pytest.mark.parametrize(
    "statement", [f"DROP TABLE {RUNTIME}", f"DELETE FROM {RUNTIME}", f"UPDATE {RUNTIME} SET globalTid = (9 << 24) + 1"]
)
def test_export_without_cuda_calls_attributes_nothing(change: Callable[..., Path], statement: str) -> None:
    made = profile(read(change(statement)))
    assert made.phase_coverage == 0
    assert "no CUDA call was recorded" in made.notes[0]
    assert "714 kernels have no recorded launch" in made.notes[-1]


def test_start_end_ranges_and_registered_strings_are_read(change: Callable[..., Path]) -> None:
    """Their eventType is 60; the name is `text`, or the string with the id `textId` where that is NULL."""
    trace = read(
        change(
            "UPDATE NVTX_EVENTS SET eventType = 60 WHERE text = 'backward'",
            "INSERT INTO StringIds VALUES (9999, 'backward')",
            "UPDATE NVTX_EVENTS SET textId = 9999, text = NULL WHERE text = 'backward'",
        )
    )
    assert [r.name for r in trace.ranges].count("backward") == 3
    assert sum(place.phase == "backward" for place in profile(trace).places) == 426


def test_unknown_layout_is_distinguished_from_damage(change: Callable[..., Path]) -> None:
    reason = r"NVTX_EVENTS \(nsys 2024.2.3.38, schema 3.11.1\) lacks eventType, which exports of nsys 2021 to 2026 have"
    with pytest.raises(ConfigError, match=reason):
        read(change("ALTER TABLE NVTX_EVENTS DROP COLUMN eventType"))


def test_missing_name_is_replaced_by_its_id(export: Callable[..., Path]) -> None:
    path = export(ranges=[("step", 0, 1000, MAIN), ("forward", 50, 900, MAIN)])
    database = sqlite3.connect(path)
    ((lost,),) = database.execute("SELECT id FROM StringIds WHERE value = 'gemm'")
    database.execute("UPDATE StringIds SET value = NULL WHERE value = 'gemm'")
    database.commit()
    database.close()
    assert [kernel.function.name for kernel in read(path).kernels] == [f"kernel {lost}"]


def test_kernels_without_duration_are_refused(change: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="is damaged: its kernels take no time"):
        profile(read(change(f"UPDATE {KERNELS} SET end = start")))


def test_kernels_with_negative_duration_are_reported_and_left_out(change: Callable[..., Path]) -> None:
    trace = read(change(f"UPDATE {KERNELS} SET end = start - 5 WHERE correlationId % 10 = 0"))
    assert (trace.kernels.end_s >= trace.kernels.start_s).all()
    assert (
        f"{714 - len(trace.kernels)} kernels that have no end, or end before they start, are left out"
        in trace.limitations[0]
    )
    assert 0 < len(trace.kernels) < 714


def test_copies_with_negative_duration_are_reported_and_left_out(change: Callable[..., Path]) -> None:
    trace = read(change("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET end = start - 5 WHERE rowid % 4 = 0"))
    assert len(trace.copies) == 18
    assert "6 memcpys that have no end, or end before they start, are left out" in trace.limitations


def test_views_are_ignored(change: Callable[..., Path]) -> None:
    path = change(f"ALTER TABLE {KERNELS} RENAME TO hidden", f"CREATE VIEW {KERNELS} AS SELECT * FROM hidden")
    with pytest.raises(ConfigError, match=r"holds no kernel"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: the trace was never written"),
        (b"\x7fELF", "is a damaged export .*; export it again"),
        (b"SQLite format 3\0" + b"\xff" * 3000, "is a damaged export .*; export it again"),
    ],
)
def test_file_other_than_an_nsys_export_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.sqlite"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_truncated_export_is_refused(nsys_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.sqlite"
    path.write_bytes(nsys_path.read_bytes()[: nsys_path.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"is a damaged export"):
        read(path)


def test_export_with_a_damaged_schema_is_refused(nsys_path: Path, tmp_path: Path) -> None:
    """SQLite quotes the damaged statement in its error, which need not be UTF-8."""
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(nsys_path.read_bytes().replace(b"CREATE TABLE StringIds", b"CREATE \xef\xffBLE StringIds"))
    with pytest.raises(ConfigError, match=r"is a damaged export \('utf-8' codec can't decode"):
        read(path)
    with pytest.raises(ConfigError, match=r"is a damaged export"):
        nsys.read(path)
    assert nsys.processes(path) == []


def test_unrelated_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE users (name)")
    database.commit()
    database.close()
    with pytest.raises(ConfigError, match="SQLite file without tables of a profiler; give an export of nsys"):
        read(path)


def test_folder_and_missing_file_have_distinct_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; give a trace file"):
        read(tmp_path)
    for name in ("a.trace.json.gz", "b.sqlite", "c.ncu-rep", "records.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"is a folder; give one of\n  \S+/a.trace.json.gz\n  \S+/b.sqlite$"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"does not exist"):
        read(tmp_path / "none.sqlite")
    with pytest.raises(ConfigError, match=r"is not a plain file; give a trace file"):
        read(Path(os.devnull))


EMPTY_EXPORT = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('CREATE TABLE StringIds (id, value)')"


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep"])
def test_report_requires_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nsys_path: Path, suffix: str) -> None:
    report = tmp_path / f"run{suffix}"
    report.write_bytes(b"\x01\x02\x03")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"nsys is not on the PATH; add it .*nsys export -t sqlite --lazy=false"):
        read(report)
    beside = report.with_suffix(".sqlite")
    beside.touch()
    with pytest.raises(ConfigError, match=rf"nsys is not on the PATH; analyze {beside}, the export next to it, or run"):
        read(report)
    nsys = tmp_path / "nsys"
    nsys.write_text("#!/bin/sh\necho 'importer missing' >&2; exit 1\n")
    nsys.chmod(0o755)
    with pytest.raises(ConfigError, match=r"nsys cannot export .*: importer missing; use an nsys at least as new"):
        read(report)
    nsys.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n/bin/cp {nsys_path} "$2"\n')
    trace = read(report)
    assert (len(trace.kernels), trace.source) == (714, str(report))
    nsys.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n{sys.executable} -c "{EMPTY_EXPORT}" "$2"\n')
    with pytest.raises(ConfigError, match=rf"^{report} holds no kernel"):
        read(report)
