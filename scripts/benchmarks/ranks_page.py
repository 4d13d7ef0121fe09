"""Time and memory of the page of many ranks, made from one large trace of torch.profiler per rank.

Method: the recording among the test data (3 training steps, one H200) gets collectives in each step, with clocks and
arrivals that differ between ranks, and is repeated until it is as large as asked for. `cs-systems analyze` makes one
page of all ranks, in a process of its own without the cache, and headless Chromium opens it.
Output: one line. The promises for 64 ranks of 100 MB are 5 minutes and 4 GB.

    python scripts/benchmarks/ranks_page.py --ranks 64 --megabytes 100
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _browser import Browser
from analyze_speed import measure, recorded_kineto, repeat_kineto

STREAM, TRANSFER_US, PER_STEP = 20, 150.0, 8
AHEAD_US, LATE_US = 1_000.0, 20.0  # between the clocks, and the arrivals, of one rank and the next


def of_rank(rank: int, ranks: int) -> dict[str, Any]:
    """Return the recording as if one of the ranks had made it: PER_STEP collectives after each step's launches."""
    trace = recorded_kineto()
    events = [event for event in trace["traceEvents"] if event.get("ph") != "i"]
    for event in events:
        if event.get("ts"):
            event["ts"] += rank * AHEAD_US
    backward = [event for event in events if event.get("name") == "backward" and event.get("cat") == "user_annotation"]
    for step, within in enumerate(backward):
        for number in range(PER_STEP):
            first = within["ts"] + (number + 1) * within["dur"] / (PER_STEP + 1)
            start, end = first + (rank % 8) * LATE_US, first + 7 * LATE_US + TRANSFER_US
            correlation = 5_000_000 + 100 * step + number
            launch = {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": first - 5, "dur": 4.0}
            events.append(
                {"ph": "X", "pid": within["pid"], "tid": within["tid"], **launch, "args": {"correlation": correlation}}
            )
            args = {
                "device": 0, "stream": STREAM, "correlation": correlation, "Collective name": "allreduce",
                "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": ranks, "dtype": "Float",
                "Process Group Name": "0", "Process Group Ranks": str([*range(ranks)]), "Seq": PER_STEP * step + number,
            }  # fmt: skip
            kernel = {
                "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                "cat": "kernel",
                "ts": start,
                "dur": end - start,
            }
            events.append({"ph": "X", "pid": 0, "tid": STREAM, **kernel, "args": args})
    job = {"rank": rank, "world_size": ranks, "backend": "nccl"}
    return {**trace, "distributedInfo": job, "host_name": f"host{rank // 8}", "traceEvents": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=20, help="size of each rank's trace")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(args.ranks):
            repeat_kineto(folder / f"rank{rank}.json", args.megabytes, of_rank(rank, args.ranks))
        page = folder / "page.html"
        command = [sys.executable, "-m", "cs_systems", "analyze", str(folder), "--no-cache", "--format", "html"]
        wall_s, processor_s, peak_mb = measure([*command, "--output", str(page)])
        with Browser() as browser, browser.open(page) as tab:
            ready_ms = float(tab.evaluate("document.documentElement.dataset.readyMs"))
            boxes = tab.evaluate("timeline.rows.reduce((sum, row) => sum + row.size, 0)")
            problems = tab.problems()
        size = f"{page.stat().st_size / 1e6:.2f} MB, {boxes:,} boxes"
        print(
            f"{args.ranks} ranks of {args.megabytes} MB: made in {wall_s:.1f} s, {processor_s:.1f} s on a processor, "
            f"peak {peak_mb:.0f} MB; page {size}, ready in {ready_ms:.0f} ms; "
            f"{os.cpu_count()} cores, load {load:.1f} before{'; ' + '; '.join(problems) if problems else ''}"
        )


if __name__ == "__main__":
    main()
