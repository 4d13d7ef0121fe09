"""Host time of a small attention call, beside its device time, for every backend.

Method: one process; for each backend a forward, and a forward with its backward, through its public function and
autograd. A sample is many calls in a row, submitted while a sleeping kernel occupies the GPU, so that the host waits
for nothing: the host's time is the submission over the number of calls. The device's time is that of the same calls,
between two events, behind the sleeping kernel. If the queue of launches fills, so that the host has to wait after all,
the number of calls is halved. The first samples are warm-up; compiling belongs to them.
Output: a line for each backend as it is measured, then a markdown table: medians, and the middle 80% of the samples as
a share of the median. With --out also table.md and rows.jsonl there. Committed: profiles/attention_host_cost/.

    python scripts/benchmarks/attention_host_cost.py --out runs/attention_host_cost
    python scripts/benchmarks/attention_host_cost.py --attention sdpa_cudnn flash_cuda --shape 4,25,2048,64
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cs_systems.attention import AttentionBackend, AttentionCall
from cs_systems.core import plugins
from cs_systems.core.statistics import quantile
from cs_systems.machine.device import Device, DeviceUnavailable, resolve
from cs_systems.record import Sample
from cs_systems.report.tables.rows import render_rows
from cs_systems.runtime.timing import measure
from cs_systems.workloads import CallableWorkload

PEER = "sdpa_cudnn"
# Those that compile for tens of seconds come last: the time budget leaves them out first.
BACKENDS = (
    *("sdpa_cudnn", "flash_cuda", "flash_triton", "flash_gluon", "sdpa_flash", "sdpa_efficient", "sdpa_math", "naive"),
    *("flash_attn", "flash_torch", "flex", "compiled"),
)
PASSES = ("forward", "both")
MOST_CALLS, WARMUP, SAMPLES = 32, 3, 15
WAITED = 0.9  # share of the occupied time from which a submission counts as having waited
MICROSECONDS = 1e6


class Calls(CallableWorkload):
    hides_launches = True

    def __init__(self, call: Callable[[], object], count: int) -> None:
        super().__init__(lambda: [call() for _ in range(count)])


def calls_of(
    backend: AttentionBackend, shape: Sequence[int], dtype: torch.dtype, causal: bool
) -> dict[str, Callable[[], object]]:
    q, k, v = (torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)

    def forward() -> torch.Tensor:
        return backend(q, k, v, causal=causal)

    return {"forward": forward, "both": lambda: torch.autograd.grad(forward(), (q, k, v), gradient)}


def samples_of(call: Callable[[], object], device: Device) -> tuple[list[Sample], int]:
    """Return the samples, and how many calls each has, so few that the host waited in none."""
    count = MOST_CALLS
    while True:
        measured = measure(Calls(call, count), device, warmup=WARMUP, steps=SAMPLES)
        samples = [sample for sample in measured if not sample.warmup]
        waited = [s.submit_s["call"] > WAITED * (s.held_s or 0.0) for s in samples]
        if count == 1 or sum(waited) < len(samples) / 2:
            return samples, count
        count //= 2


def row_of(name: str, backend: AttentionBackend, args: argparse.Namespace, device: Device) -> dict[str, Any]:
    """Return medians and spreads in seconds, or the reason that there are none."""
    _, heads, seq, d_head = args.shape
    call = AttentionCall("cuda", args.dtype, d_head, seq, seq, heads, heads, args.causal)
    row: dict[str, Any] = {"attention": name}
    if reason := backend.unavailable(call):
        return row | {"reason": reason}
    for kind, run in calls_of(backend, args.shape, getattr(torch, args.dtype), args.causal).items():
        samples, count = samples_of(run, device)
        host = [s.submit_s["call"] / count for s in samples]
        row |= {
            f"{kind}_host_s": median(host),
            f"{kind}_spread": (quantile(host, 0.9) - quantile(host, 0.1)) / median(host),
            f"{kind}_device_s": median(s.phases_s["call"] / count for s in samples),
            f"{kind}_calls": count,
        }
    return row


def table(rows: Sequence[dict[str, Any]], caption: str) -> str:
    peer = next((row.get("both_host_s") for row in rows if row["attention"] == PEER), None)
    shown, notes = [], []
    for row in rows:
        if "reason" in row:
            notes.append(f"{row['attention']}: {row['reason']}")
            continue
        cells = {"attention": row["attention"]}
        for kind in PASSES:
            cells[f"{kind}_host"] = f"{row[f'{kind}_host_s'] * MICROSECONDS:.1f}"
            cells[f"{kind}_spread"] = f"{row[f'{kind}_spread']:.0%}"
            cells[f"{kind}_device"] = f"{row[f'{kind}_device_s'] * MICROSECONDS:.1f}"
        shown.append(cells | {"peer": f"{row['both_host_s'] / peer:.2f}" if peer else "–"})
    titles = {"peer": f"both, host ÷ {PEER}"}
    for kind, words in zip(PASSES, ("forward", "forward + backward"), strict=True):
        titles |= {
            f"{kind}_host": f"{words}: host µs",
            f"{kind}_spread": "spread",
            f"{kind}_device": "device µs",
        }
    return render_rows(shown, "markdown", caption, notes, titles=titles) if shown else "\n".join(notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=plugins.names("attention"), default=BACKENDS, metavar="NAME")
    parser.add_argument("--shape", default="4,12,512,64", help="batch,heads,seq,d_head (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--full", dest="causal", action="store_false", help="without the causal mask")
    parser.add_argument("--budget-s", type=float, default=45.0, help="start no backend after this time (%(default)s s)")
    parser.add_argument("--out", type=Path, help="folder for table.md and rows.jsonl")
    args = parser.parse_args()
    text = args.shape
    try:
        args.shape = [int(number) for number in text.split(",")]
        batch, heads, seq, d_head = args.shape
    except ValueError:
        parser.error(f"--shape must be four whole numbers, batch,heads,seq,d_head; got {text!r}")
    try:
        device = resolve("cuda")
    except DeviceUnavailable as error:
        parser.error(str(error))
    started, rows = time.monotonic(), list[dict[str, Any]]()
    for name in args.attention:
        if time.monotonic() - started > args.budget_s:
            rows.append({"attention": name, "reason": f"not started: the budget of {args.budget_s:g} s was spent"})
        else:
            try:
                rows.append(row_of(name, plugins.get("attention", name), args, device))
            except Exception as error:  # a peer's failure must not cost the other rows
                rows.append({"attention": name, "reason": f"failed: {type(error).__name__}: {error}"})
        print(json.dumps(rows[-1] | {"elapsed_s": round(time.monotonic() - started, 1)}), flush=True)
    mask = "causal" if args.causal else "without a mask"
    where = f"python {platform.python_version()}, torch {torch.__version__}, {device.name}"
    shown = table(rows, f"{batch} × {heads} × {seq} × {d_head}, {args.dtype}, {mask}; {where}")
    print(shown)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(shown + "\n")
        (args.out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
