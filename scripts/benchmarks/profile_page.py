"""Size of the page of up to a million kernels, the time until it can be used, and the time of a frame.

Method: the traces of nsys and of torch.profiler among the test data (3 training steps on one H200) are repeated until
they have that many kernels, and `cs-systems analyze --format html` makes each into a page; the latter has eight
operators for each kernel, of which the page draws the longest, and stops at a tenth of the kernels: its trace of a
million would have 4 GB. Headless Chromium opens it in a new tab each time; the page itself says how long it took from
the navigation until it was drawn and could be used (`readyMs`). Then the timeline is drawn anew at zooms from all steps
to a thousandth of them, as a wheel would have it. The processor's time is of the page's main thread, rasterisation
included. A frame's time is the least of all runs at its zoom: other programs on the cores lengthen even that, since
they share the caches. The slowest zooms are those where a level of detail is summed up for the first time, once for
each page. Last, the timeline is zoomed in and out with every frame that the browser shows, of which there are at most
60 a second.
Output: one line for each page, and a picture of the page of one trace as it is. The promises are under 5 MB, under 1 s,
and frames of under 16.7 ms (60 a second); for 1,000,000 kernels, 3 s and 30 frames a second.

    python scripts/benchmarks/profile_page.py --picture profiles/profile_page/page.png > profiles/profile_page/speed.md
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _browser import Browser, frames, frames_per_s, zooms
from analyze_speed import DATA, repeat_kineto, repeat_nsys

KERNELS = {"nsys": [1_000, 10_710, 100_200, 1_000_000], "kineto": [1_000, 10_710, 100_200]}
MEGABYTES_PER_KERNEL = 4.184e-3  # size of a torch.profiler trace per kernel, in MB


def make(folder: Path, profiler: str, kernels: int) -> tuple[Path, float]:
    """Return (the page, seconds that making it took)."""
    trace, page = folder / ("step.sqlite" if profiler == "nsys" else "step.json"), folder / "page.html"
    if profiler == "nsys":
        repeat_nsys(trace, kernels)
    else:
        repeat_kineto(trace, round(kernels * MEGABYTES_PER_KERNEL))
    start = time.monotonic()
    analyze(trace, page)
    return page, time.monotonic() - start


def analyze(trace: Path, page: Path) -> None:
    command = [sys.executable, "-m", "cs_systems", "analyze", trace, "--format", "html", "--output", page]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def photograph(browser: Browser, picture: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export, page = Path(folder) / "small2.sqlite", Path(folder) / "page.html"
        export.write_bytes(gzip.decompress((DATA / "nsys_h200_small2.sqlite.gz").read_bytes()))
        analyze(export, page)
        with browser.open(page, height=1150) as tab:
            tab.screenshot(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, nargs="*", help="default: up to a million of nsys")
    parser.add_argument("--profilers", nargs="*", default=[*KERNELS], choices=[*KERNELS])
    parser.add_argument("--runs", type=int, default=7, help="number of times that each page is opened")
    parser.add_argument("--picture", type=Path, help="file for a PNG of the page of the unrepeated export")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with Browser() as browser:
        if args.picture:
            photograph(browser, args.picture)
        machine = f"Python {platform.python_version()}; {os.cpu_count()} cores, whose load was {load:.1f} before"
        print(f"Chromium {browser.version}, headless, without a GPU; {machine}.")
        print(f"Medians of {args.runs} times that the page is opened; a frame's is the processor's least at its zoom.")
        print("60 frames a second, the most that the browser shows, are 16.7 ms each: median … highest of these times,")
        print("while the timeline is zoomed in and out.\n")
        print(
            "| profiler | kernels | operators drawn | page MB | ready ms | on a processor ms | frame ms, median | "
            "frame ms, slowest zoom | frames a second | made in s |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for profiler in args.profilers:
            for kernels in args.kernels or KERNELS[profiler]:
                print("|", " | ".join(measure(browser, profiler, kernels, args.runs)), "|", flush=True)


def measure(browser: Browser, profiler: str, kernels: int, runs: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        page, took_s = make(Path(folder), profiler, kernels)
        ready, processor, drawn, rates, counts = [], [], [], [], [0, 0]
        for _ in range(runs):
            with browser.open(page) as tab:
                processor.append(tab.processor_ms())
                ready.append(float(tab.evaluate("document.documentElement.dataset.readyMs")))
                drawn.append(frames(tab, zooms(deepest=1000, factor=0.8)))
                rates.append(frames_per_s(tab))
                counts = tab.evaluate(
                    "[data.streams, data.operators].map((of) => of.reduce((n, l) => n + l.start.length, 0))"
                )
        by_zoom = [min(times) for times in zip(*drawn, strict=True)]
        times = (f"{median(ready):.0f}", f"{median(processor):.0f}", f"{median(by_zoom):.1f}", f"{max(by_zoom):.1f}")
        size = f"{page.stat().st_size / 1e6:.2f}"
        return [
            profiler,
            *(f"{number:,}" for number in counts),
            size,
            *times,
            f"{median(rates):.0f} … {max(rates):.0f}",
            f"{took_s:.1f}",
        ]


if __name__ == "__main__":
    main()
