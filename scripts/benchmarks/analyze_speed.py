"""Time and memory of `cs-systems analyze` on a large trace.

Method: the two recordings among the test data (3 training steps, 714 kernels, one H200) are repeated, each time later
and with launches of its own, until they are as large as asked for; the one of nsys gets CUDA calls until it has two for
each kernel. Then every table is made from each in a process of its own; its time and memory count, and so do other
tools on the same file, in turns: `nsys stats` where nsys is installed, and HolisticTraceAnalysis with --hta.
Where other programs want the processors too, the time on a processor is what to go by, and the load says so.
Output: one line for each file and tool. Committed: profiles/analyze_speed/.

    python scripts/benchmarks/analyze_speed.py --kernels 1000000 --kineto-megabytes 500 --hta VENV/bin/python
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "tests" / "data"
PERIOD_NS = 40_000_000  # the recordings last 30 ms
# Reports of `nsys stats` nearest to the tables of `analyze`, by their names before and since nsys 2023.
REPORTS = {
    "gpukernsum": "cuda_gpu_kern_sum", "cudaapisum": "cuda_api_sum", "gpumemtimesum": "cuda_gpu_mem_time_sum",
    "nvtxsum": "nvtx_sum", "nvtxkernsum": "nvtx_kern_sum",
}  # fmt: skip
HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    trace = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
    trace.get_temporal_breakdown(visualize=False)
    trace.get_gpu_kernel_breakdown(visualize=False)
    trace.get_idle_time_breakdown(visualize=False)
"""


def repeat_nsys(target: Path, kernels: int) -> None:
    """Write the export with its events repeated, each copy later and with correlation numbers of its own."""
    target.write_bytes(gzip.decompress((DATA / "nsys_h200_step.sqlite.gz").read_bytes()))
    database = sqlite3.connect(target)
    database.execute("PRAGMA synchronous=OFF")
    count = int(database.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()[0])
    database.execute(
        f"CREATE TEMP TABLE copies AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c "
        f"WHERE n < {max(1, kernels // count - 1)}) SELECT n FROM c"
    )
    for table in ("KERNEL", "RUNTIME", "MEMCPY"):
        _repeat(database, f"CUPTI_ACTIVITY_KIND_{table}")
    _repeat(database, "NVTX_EVENTS")
    calls = int(database.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()[0])
    columns = _columns(database, "CUPTI_ACTIVITY_KIND_RUNTIME")
    filled = ", ".join({"correlationId": "correlationId + 1000000000"}.get(c, c) for c in columns)
    database.execute(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME ({', '.join(columns)}) "
        f"SELECT {filled} FROM CUPTI_ACTIVITY_KIND_RUNTIME "
        f"WHERE nameId NOT IN (SELECT id FROM StringIds WHERE value LIKE '%Synchronize%') "
        f"LIMIT {max(0, 2 * kernels - calls)}"
    )
    database.commit()
    database.close()


def _columns(database: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def _repeat(database: sqlite3.Connection, table: str) -> None:
    shifted = {
        "start": f"start + n * {PERIOD_NS}",
        "end": f"end + n * {PERIOD_NS}",
        "correlationId": "correlationId + n * 100000",
    }
    columns = _columns(database, table)
    values = ", ".join(shifted.get(column, column) for column in columns)
    # Sorted by n first, so that rows lie in the file in the order of time, as nsys writes them.
    database.execute(
        f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM copies CROSS JOIN {table} ORDER BY n"
    )


def recorded_kineto() -> dict[str, Any]:
    """Return the recording of torch.profiler among the test data."""
    trace: dict[str, Any] = json.loads(gzip.decompress((DATA / "kineto_h200_step.json.gz").read_bytes()))
    return trace


def repeat_kineto(target: Path, megabytes: int, trace: dict[str, Any] | None = None) -> int:
    """Write a trace, by default the recorded one, repeated until it has the size; return the number of its kernels."""
    trace = dict(trace or recorded_kineto())
    events = trace.pop("traceEvents")
    # Text of all events with a place for each number that differs between copies: far faster than an encoder of JSON.
    numbers: list[float] = []
    steps: list[float] = []
    # One line per event: torch.profiler spreads it over several, with less white space than this indent would add.
    template = ",\n  ".join(_with_places(event, numbers, steps) for event in events)
    copies, written = 0, 0
    with target.open("w") as file:
        file.write(json.dumps(trace)[:-1] + ', "traceEvents": [')
        while written < megabytes * 1_000_000:
            later = tuple(number + copies * step for number, step in zip(numbers, steps, strict=True))
            written += file.write((",\n  " if copies else "") + template % later)
            copies += 1
        file.write("]}")
    return copies * sum(event.get("cat") == "kernel" for event in events)


def _with_places(event: dict, numbers: list[float], steps: list[float]) -> str:  # type: ignore[type-arg]
    """Return the event as JSON for the operator %; append the numbers to put in and their step from copy to copy."""
    args = dict(event.get("args", {}))
    later: dict[str, tuple[float, float, str]] = {}
    if event.get("ts"):
        later["ts"] = event["ts"], PERIOD_NS / 1e3, "%.3f"
    later |= {name: (args[name], 10_000, "%d") for name in ("correlation", "Sequence number", "Seq") if name in args}
    marked = event | ({"args": args | {n: f"<{n}>" for n in later if n in args}} if args else {})
    text = json.dumps(marked | ({"ts": "<ts>"} if "ts" in later else {})).replace("%", "%%")
    for name in sorted(later, key=lambda name: text.index(f'"<{name}>"')):
        number, step, form = later[name]
        text = text.replace(f'"<{name}>"', form, 1)
        numbers.append(number)
        steps.append(step)
    return text


def measure(command: Sequence[str]) -> tuple[float, float, float]:
    """Return (wall s, processor s, peak memory in MB) of a command with the processes that it starts."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.monotonic() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def own_command(path: Path) -> list[str]:
    return [sys.executable, "-m", "cs_systems", "analyze", str(path), "--no-cache"]


def stats_command(path: Path) -> list[str]:
    """Return the command of `nsys stats` with the reports that this version of nsys has."""
    known = subprocess.run(["nsys", "stats", "--help-reports"], capture_output=True, text=True).stdout.split()
    reports = [new if new in known else old for old, new in REPORTS.items()]
    return ["nsys", "stats", "--report", ",".join(reports), "--format", "csv", "-o", "-", str(path)]


def rounds(commands: dict[str, list[str]], runs: int) -> dict[str, tuple[float, ...]]:
    """Return the medians of the results of `measure` by tool; the tools run in turns."""
    found: dict[str, list[tuple[float, float, float]]] = {tool: [] for tool in commands}
    for _ in range(runs):
        for tool, command in commands.items():
            found[tool].append(measure(command))
    return {tool: tuple(map(statistics.median, zip(*values, strict=True))) for tool, values in found.items()}


def waiting() -> float:
    """Return the load per processor: programs that ran or waited for one over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=100_000, help="number of kernels in the export of nsys")
    parser.add_argument("--kineto-megabytes", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--hta", help="Python interpreter with HolisticTraceAnalysis, which reads the Kineto trace too")
    args = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} processors; medians of {args.runs} runs of each tool, "
        "in turns, each in a process of its own.\n\n"
        "| recording | kernels | MB | tool | wall s | of it on a processor s | peak MB | load before, a processor |\n"
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory() as folder:
        export, trace = Path(folder) / "large.sqlite", Path(folder) / "large.json"
        repeat_nsys(export, args.kernels)
        kineto_kernels = repeat_kineto(trace, args.kineto_megabytes)
        nsys = {"nsys stats": stats_command(export)} if shutil.which("nsys") else {}
        hta = {"HolisticTraceAnalysis": [args.hta, "-c", HTA, str(trace)]} if args.hta else {}
        for name, path, kernels, others in (
            ("nsys, 2 CUDA calls a kernel", export, args.kernels, nsys),
            ("Kineto", trace, kineto_kernels, hta),
        ):
            load, megabytes = waiting(), path.stat().st_size / 1e6
            for tool, (wall, cpu, peak) in rounds({"analyze": own_command(path), **others}, args.runs).items():
                print(
                    f"| {name} | {kernels:,} | {megabytes:.0f} | {tool} | {wall:.1f} | {cpu:.1f} | {peak:.0f} | "
                    f"{load:.1f} |",
                    flush=True,
                )
    print(
        "\nanalyze: `cs-systems analyze FILE --no-cache`, every table. nsys stats: the reports "
        f"{', '.join(REPORTS)}. HolisticTraceAnalysis: reading the trace, temporal, kernel and idle-time breakdown."
    )
    print(f"\n    python scripts/benchmarks/analyze_speed.py {' '.join(sys.argv[1:])}")


if __name__ == "__main__":
    main()
