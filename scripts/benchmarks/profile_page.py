"""Size of the page of a step of 10,000 kernels, and the time until it can be used.

Method: the export of nsys among the test data (3 training steps on one H200) is repeated until it has that many
kernels, with one range around them all, and `cs-systems analyze --format html` makes that range into a page. Headless
Chromium opens it in a new profile each time; the page itself says how long it took from the navigation until it was
drawn and could be used (`readyMs`), and of that from the first line of its script (`buildMs`). Then the timeline is
drawn anew at zooms from the whole step to a thousandth of it, as a wheel would have it.
Output: one line for each number of kernels, and a picture of the page of the export as it is. The promises are under
5 MB and under 1 s.

    python scripts/benchmarks/profile_page.py --picture profiles/profile_page/page.png > profiles/profile_page/speed.md
"""

from __future__ import annotations

import argparse
import gzip
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _browser import command, opened
from analyze_speed import DATA, repeat_nsys

STEP = "all kernels"


def make(folder: Path, kernels: int) -> tuple[Path, float]:
    """Return (the page, seconds that making it took)."""
    export, page = folder / "step.sqlite", folder / "page.html"
    repeat_nsys(export, kernels)
    database = sqlite3.connect(export)
    first, last = database.execute("SELECT min(start), max(end) FROM NVTX_EVENTS").fetchone()
    thread = database.execute("SELECT globalTid FROM NVTX_EVENTS LIMIT 1").fetchone()[0]
    database.execute(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, text) VALUES (?, ?, 59, ?, ?)",
        (first - 1, last + 1, thread, STEP),
    )
    database.commit()
    database.close()
    start = time.monotonic()
    analyze(export, page, "--range", STEP)
    return page, time.monotonic() - start


def analyze(export: Path, page: Path, *options: str) -> None:
    command = [sys.executable, "-m", "cs_systems", "analyze", export, *options, "--format", "html", "--output", page]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def photograph(picture: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export, page = Path(folder) / "small2.sqlite", Path(folder) / "page.html"
        export.write_bytes(gzip.decompress((DATA / "nsys_h200_small2.sqlite.gz").read_bytes()))
        analyze(export, page)
        shot = ("--hide-scrollbars", "--window-size=1280,1290", f"--screenshot={picture.absolute()}", page.as_uri())
        subprocess.run([*command(Path(folder) / "profile"), *shot], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, nargs="*", default=[1_000, 10_710, 50_000])
    parser.add_argument("--runs", type=int, default=7, help="number of times that each page is opened")
    parser.add_argument("--picture", type=Path, help="file for a PNG of the page of the unrepeated export")
    args = parser.parse_args()
    if args.picture:
        photograph(args.picture)
    version = subprocess.run(
        [*command(Path()), "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    print(f"Chromium {version}, headless, without a GPU; Python {platform.python_version()}; medians of {args.runs}\n")
    print("| kernels | page MB | ready ms | of it script ms | frame ms, median | frame ms, worst | made in s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kernels in args.kernels:
        with tempfile.TemporaryDirectory() as folder:
            page, took_s = make(Path(folder), kernels)
            views = [opened(page, deepest=1000, factor=0.8, also="{ kernels: step.kernels }") for _ in range(args.runs)]
            ready, build = (median(float(str(t[name])) for t in views) for name in ("readyMs", "buildMs"))
            frames = [float(f) for t in views for f in t["frames"]]  # type: ignore[attr-defined]
            numbers = (f"{ready:.0f}", f"{build:.0f}", f"{median(frames):.1f}", f"{max(frames):.1f}", f"{took_s:.1f}")
            size = f"{page.stat().st_size / 1e6:.2f}"
            print("|", " | ".join((f"{views[0]['kernels']:,}", size, *numbers)), "|", flush=True)


if __name__ == "__main__":
    main()
