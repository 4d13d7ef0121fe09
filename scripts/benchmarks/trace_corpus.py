"""Report on foreign traces that `cs-systems analyze` reads: the result for each, and the share that stays unknown.

Method: every file of a folder is read as the command reads it. `count`, a reader of its own that shares no code with
the package, loads the whole file and adds up its kernels; a row says whether both agree, in number and in time to the
nanosecond. Files of others are not committed; the table names files of public repositories.
Output: a markdown table, a row for each file. Committed: profiles/trace_corpus/, for recordings in public repositories
on GitHub, such as the test data of HolisticTraceAnalysis and TraceLens.

    python scripts/benchmarks/trace_corpus.py FOLDER > profiles/trace_corpus/table.md
"""

from __future__ import annotations

import argparse
import gzip
import json
import sqlite3
import subprocess
import tempfile
import warnings
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from cs_systems.analysis.attribution.inferred_phases import how_inferred
from cs_systems.analysis.attribution.profile import BY_PHASES, WHOLE, Profile, profile
from cs_systems.config import ConfigError
from cs_systems.core.units import counted, human
from cs_systems.readers import ncu, read

QUESTION = "Which public traces does `cs-systems analyze` read, how, and what stays unknown?"
COLUMNS = ("file", "kind", "kernels", "their time", "equal", "steps", "phases", "in a phase", "in a layer", "unknown")
LONGEST = 260  # most characters shown of the unknown part
SAME_S = 1e-9  # allowed difference per kernel between the two times, due to rounding


class Count(NamedTuple):
    """Contents of a file as counted by the independent reader."""

    kind: str
    kernels: int
    time_us: float
    processes: tuple[int, ...] = ()  # processes that launched kernels, if there are several


def count(path: Path) -> Count:
    """Count the contents of a file without any code of the package."""
    if path.suffix == ".ncu-rep":
        return _count_of_ncu(path)
    if path.suffix == ".nsys-rep":
        return _count_of_report(path)
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    if raw.startswith(b"SQLite format 3"):
        return _count_of_sqlite(path)
    try:
        data = json.loads(raw)
    except ValueError:
        return Count("no JSON", 0, 0.0)
    if isinstance(data, dict) and (tools := data.get("rocprofiler-sdk-tool")):
        rows = [row for tool in tools for row in tool["buffer_records"]["kernel_dispatch"]]
        return Count("rocprofv3, JSON", len(rows), sum(r["end_timestamp"] - r["start_timestamp"] for r in rows) / 1e3)
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if events is None:
        return Count("JSON, no trace", 0, 0.0)
    kernels = [event for event in events if event.get("cat") in ("kernel", "Kernel") and event.get("ph") == "X"]
    categories = Counter(str(event.get("cat")) for event in events)
    calls = (str(event.get("name")) for event in events if event.get("cat") == "cuda_runtime")
    if any(name.startswith("hip") for name in calls):
        kind = "Kineto, ROCm"
    elif kernels:
        kind = "Kineto, CUDA"
    elif categories["cuda_profiler_range"]:
        kind = "Kineto, counters"
    else:
        kind = "Kineto, MTIA" if categories["mtia_ccp_events"] else "Kineto, host only"
    return Count(kind, len(kernels), sum(event["dur"] for event in kernels))


def _count_of_sqlite(path: Path) -> Count:
    with closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if "rocpd_api" in tables:
            number, time_us = database.execute(
                "SELECT count(*), ifnull(sum(end - start), 0) / 1e3 FROM rocpd_op"
            ).fetchone()
            return Count("rocmProfileData", number, time_us)
        if dispatches := [name for name in tables if name.startswith("rocpd_kernel_dispatch")]:
            (of,) = dispatches  # dispatches of the only process
            number, time_us = database.execute(f"SELECT count(*), sum(end - start) / 1e3 FROM {of}").fetchone()
            return Count("rocprofv3, rocpd", number, time_us)
        return _count_of_nsys(database)


def _count_of_report(path: Path) -> Count:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "export.sqlite"
        done = subprocess.run(["nsys", "export", "-t", "sqlite", "-o", target, path], capture_output=True)
        found = _count_of_sqlite(target) if not done.returncode and target.is_file() else Count("nsys", 0, 0.0)
    return found._replace(kind="nsys report")


def _count_of_ncu(path: Path) -> Count:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import ncu_report
    report = ncu_report.load_report(str(path))
    ranges = [report.range_by_idx(i) for i in range(report.num_ranges())]
    launches = [one.action_by_idx(i) for one in ranges for i in range(one.num_actions())]
    times = [launch.metric_by_name("gpu__time_duration.sum") for launch in launches]
    to_us = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
    return Count("ncu", len(launches), sum(time.as_double() * to_us[time.unit()] for time in times if time is not None))


def _count_of_nsys(database: sqlite3.Connection) -> Count:
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    columns = {name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")}
    if not columns:
        return Count("nsys", 0, 0.0)
    number, time_us = database.execute(f"SELECT count(*), ifnull(sum(end - start), 0) / 1e3 FROM {table}").fetchone()
    of = database.execute(f"SELECT DISTINCT globalPid >> 24 & 0xFFFFFF FROM {table}") if "globalPid" in columns else ()
    processes = tuple(sorted(process for (process,) in of))
    return Count("nsys", number, time_us, processes if len(processes) > 1 else ())


def row(path: Path, folder: Path) -> dict[str, str]:
    """Return the row of a file."""
    own = count(path)
    found = dict.fromkeys(COLUMNS, "") | {"file": str(path.relative_to(folder)), "kind": own.kind}
    if own.kernels:
        found |= {"kernels": f"{own.kernels:,}", "their time": human(own.time_us * 1e-6, "_s") if own.time_us else ""}
    try:
        if own.kind == "ncu":
            times = [one["time_s"] for one in ncu.read(path)]
            untimed = times.count(None)
            return found | {
                "equal": _equal(own, len(times), sum(time_s or 0.0 for time_s in times)),
                "unknown": f"the times of {counted(untimed, 'kernel')}" if untimed else "",
            }
        each = [profile(read(path, process)) for process in own.processes or [None]]
    except ConfigError as error:
        return found | {"equal": "refused", "unknown": _short(str(error).replace(str(path), "").strip())}
    made, kernels = each[0], [one.trace.kernels for one in each]
    number, time_s = sum(map(len, kernels)), sum(float((k.end_s - k.start_s).sum()) for k in kernels)
    found |= {"equal": _equal(own, number, time_s)}
    found |= {"steps": _steps(made)}
    notes = [note for note in made.notes if "left out" in note or "no recorded launch" in note]
    if number:
        found |= {"phases": _phases(made), "in a phase": f"{made.phase_coverage:.0%}"}
        found |= {"in a layer": f"{made.layer_coverage:.0%}"}
    if own.processes:
        notes.append(f"{len(own.processes)} processes, each read by --process; steps and places are the first's")
    unknown = dict.fromkeys([*made.trace.limitations, *notes])
    return found | {"unknown": _short("; ".join(unknown))}


def _equal(own: Count, number: int, time_s: float) -> str:
    same = own.kernels == number and abs(own.time_us * 1e-6 - time_s) <= SAME_S * max(1, number)
    return ("yes" if own.kernels else "") if same else f"no: {number:,}"


def _steps(made: Profile) -> str:
    notes = " ".join(made.notes)
    how = "the whole" if WHOLE in notes else "from phases" if BY_PHASES in notes else "marked"
    return f"{len(made.steps)}, {how}"


def _phases(made: Profile) -> str:
    if not made.phase_coverage:
        return "none"
    return "inferred" if how_inferred(made.trace) in made.notes else "marked"


def _short(text: str) -> str:
    plain = text.replace("|", "/")
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of files to read")
    parser.add_argument("--about", default="", help="sentence about the folder, printed above the table")
    args = parser.parse_args()
    folder = args.folder
    rows = [row(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    with_kernels = [one for one in rows if one["kernels"]]
    equal = sum(one["equal"] == "yes" for one in with_kernels)
    print(f"# {QUESTION}\n")
    print(
        f"Of {len(rows)} files, {len(with_kernels)} hold kernels; {equal} of these are read with the number and the "
        "time of kernels\nthat an independent reader counts.\n"
    )
    if args.about:
        print(f"{args.about}\n")
    print(
        "steps: marked by ranges, found from phases, or the whole recording as one. phases: marked by ranges, or "
        "inferred."
    )
    print(f"\n    python scripts/benchmarks/trace_corpus.py {folder.name}\n")
    print(f"| {' | '.join(COLUMNS)} |\n| {' | '.join('---' for _ in COLUMNS)} |")
    for one in rows:
        print(f"| {' | '.join(one.values())} |")


if __name__ == "__main__":
    main()
