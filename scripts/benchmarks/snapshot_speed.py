"""Time and memory of `cs-systems snapshot` on a large snapshot, and the time until its page can be used.

Method: the snapshot among the test data (two training steps on one H200, 1,356 events) is repeated until it has as many
events as asked for, each copy later, and pickled as PyTorch does: frames are shared among stacks, each event has a list
of frames and texts of its own. Then every table is made from it in a process of its own; its time and memory count,
and so is the page. Headless Chromium opens that in a new tab each time; it says itself how long it took from the
navigation until it was drawn (`readyMs`), and how long a frame takes at zooms from all to a millionth of it.
Output: a line each. The promises are under 15 s and 2 GB; a page under 20 MB that opens in under 10 s.

    python scripts/benchmarks/snapshot_speed.py --events 1000000 > profiles/snapshot_speed/cpu.md
"""

from __future__ import annotations

import argparse
import gzip
import os
import pickle
import platform
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from _browser import Browser, frames, zooms
from analyze_speed import measure

DATA = Path(__file__).parents[2] / "tests" / "data" / "snapshot_h200_step.pickle.gz"


def repeat(target: Path, events: int) -> int:
    """Write the snapshot with its events repeated, and return their number."""
    data = pickle.loads(gzip.decompress(DATA.read_bytes()))
    frames: dict[tuple[Any, ...], dict[str, Any]] = {}
    trace = data["device_traces"][0]
    for event in trace:
        event["frames"] = [frames.setdefault(tuple(frame.values()), frame) for frame in event["frames"]]
    period = trace[-1]["time_us"] - trace[0]["time_us"] + 1000
    copies = -(-events // len(trace))
    data["device_traces"] = [
        [
            event
            | {"time_us": event["time_us"] + n * period, "frames": list(event["frames"])}
            # a new text object each time, because pickle stores an object that occurs twice only once
            | {"compile_context": "".join(("N/", "A"))}
            for n in range(copies)
            for event in trace
        ]
    ]
    data["external_annotations"] = [
        mark | {"time_us": mark["time_us"] + n * period} for n in range(copies) for mark in data["external_annotations"]
    ]
    with target.open("wb") as file:
        pickle.dump(data, file)
    return copies * len(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5, help="number of repeats; the table has their medians")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path, page = Path(folder) / "large.pickle", Path(folder) / "large.html"
        events = repeat(path, args.events)
        machine = f"Python {platform.python_version()}, {os.cpu_count()} cores, whose load was {load:.1f} before"
        print(f"{machine}; medians of {args.runs}")
        print(f"{events:,} events, {path.stat().st_size / 1e6:.0f} MB\n")
        print("| what | wall s | processor s | peak MB |\n| --- | ---: | ---: | ---: |")
        for name, words in (("every table", ()), ("the page", ("--format", "html", "--output", str(page)))):
            command = [sys.executable, "-m", "cs_systems", "snapshot", str(path), *words]
            numbers = zip(*(measure(command) for _ in range(args.runs)), strict=True)
            wall, cpu, peak = map(median, numbers)
            print(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak:.0f} |", flush=True)
        views, drawn = [], []
        with Browser() as browser:
            for _ in range(args.runs):
                with browser.open(page) as tab:
                    views.append(tab.evaluate("({...document.documentElement.dataset})"))
                    drawn += frames(tab, zooms(deepest=1e6, factor=0.5))
        print("\n| page MB | ready ms | of it script ms | frame ms, median | frame ms, worst |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        ready, build = (median(float(each[name]) for each in views) for name in ("readyMs", "buildMs"))
        size = page.stat().st_size / 1e6
        print(f"| {size:.1f} | {ready:.0f} | {build:.0f} | {median(drawn):.1f} | {max(drawn):.1f} |")


if __name__ == "__main__":
    main()
