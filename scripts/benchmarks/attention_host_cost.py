"""Host time and device time of a small attention call, for every backend.

Method: one process; for each backend a forward, and a forward with its backward, through its public function and
autograd. A sample is many calls in a row, submitted while a sleeping kernel occupies the GPU, so that the host waits
for nothing: the host's time is the submission over the number of calls. The device's time is for the same calls,
between two events, behind the sleeping kernel. If the queue of launches fills, so that the host has to wait after all,
the number of calls is halved. All backends are compiled first, and then measured in rounds, one after the other. The
row `python_autograd` is the floor for a backend written in Python: an autograd function that allocates and saves what
ours do, and launches nothing.
Output: a line for each backend as it is compiled, then a markdown table: medians, and the middle 80% of the samples as
a share of the median. With --out also table.md and rows.jsonl there.

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
from torch import Tensor

from cs_systems.core import plugins
from cs_systems.core.statistics import quantile
from cs_systems.machine.device import Device, DeviceUnavailable, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads import CallableWorkload
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.record import Sample
from cs_systems.report.tables.rows import render_rows

PEER, FLOOR = "sdpa_cudnn", "python_autograd"
# Backends that compile for tens of seconds come last, so that the time budget leaves them out first.
BACKENDS = (
    *(PEER, FLOOR, "flash_cuda", "flash_triton", "sdpa_flash", "sdpa_efficient", "sdpa_math", "naive"),
    *("flash_attn", "flash_torch", "flex", "compiled"),
)
PASSES = ("forward", "both")
MOST_CALLS, WARMUP, ROUNDS, SAMPLES = 32, 3, 5, 4
WAITED = 0.9  # share of the occupied time from which a submission counts as having waited
MICROSECONDS = 1e6


class Calls(CallableWorkload):
    hides_launches = True

    def __init__(self, call: Callable[[], object], count: int) -> None:
        super().__init__(self._run)
        self.call, self.count = call, count

    def _run(self) -> None:
        for _ in range(self.count):
            self.call()


class Nothing(torch.autograd.Function):
    """Autograd function that allocates and saves the same as our backends, but launches nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def backend_named(name: str) -> AttentionBackend:
    if name == FLOOR:
        return AttentionBackend(lambda q, k, v, *, causal, scale, align: Nothing.apply(q, k, v, causal))
    backend: AttentionBackend = plugins.get("attention", name)
    return backend


def calls_of(backend: AttentionBackend, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    like: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, args.dtype)}
    q, k, v = (torch.randn(*args.shape, **like, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)

    def forward() -> Tensor:
        return backend(q, k, v, causal=args.causal)

    return {"forward": forward, "both": lambda: torch.autograd.grad(forward(), (q, k, v), gradient)}


def waits(sample: Sample) -> bool:
    return sample.submit_s["call"] > WAITED * (sample.held_s or 0.0)


def fewer_calls(call: Callable[[], object], device: Device) -> Calls:
    """Return the number of calls that the host can submit without waiting, after compiling them."""
    call()
    calls = Calls(call, MOST_CALLS)
    while calls.count > 1 and waits([*measure(calls, device, warmup=1, steps=1)][-1]):
        calls.count //= 2
    return calls


def prepared(name: str, args: argparse.Namespace, device: Device) -> dict[str, Calls] | str:
    """Return the calls of both passes, or the reason why the backend has none."""
    _, heads, seq, d_head = args.shape
    backend = backend_named(name)
    if reason := backend.unavailable(AttentionCall("cuda", args.dtype, d_head, seq, seq, heads, heads, args.causal)):
        return reason
    try:
        return {kind: fewer_calls(call, device) for kind, call in calls_of(backend, args).items()}
    except Exception as error:  # a peer's failure must not affect the other rows
        return f"failed: {type(error).__name__}: {error}"


def row_of(name: str, passes: dict[str, Calls], samples: dict[tuple[str, str], list[Sample]]) -> dict[str, Any]:
    row: dict[str, Any] = {"attention": name}
    for kind, calls in passes.items():
        host = [sample.submit_s["call"] / calls.count for sample in samples[name, kind]]
        row |= {
            f"{kind}_host_s": median(host),
            f"{kind}_spread": (quantile(host, 0.9) - quantile(host, 0.1)) / median(host),
            f"{kind}_device_s": median(s.phases_s["call"] / calls.count for s in samples[name, kind]),
            f"{kind}_calls": calls.count,
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
    parser.add_argument(
        "--attention", nargs="+", choices=[FLOOR, *plugins.names("attention")], default=BACKENDS, metavar="NAME"
    )
    parser.add_argument("--shape", default="4,12,512,64", help="batch,heads,seq,d_head (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--full", dest="causal", action="store_false", help="without the causal mask")
    parser.add_argument(
        "--budget-s", type=float, default=30.0, help="compile no backend after this time (%(default)s s)"
    )
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
    started, found = time.monotonic(), dict[str, dict[str, Calls] | str]()
    for name in args.attention:
        elapsed_s = time.monotonic() - started
        spent = f"not started: the budget of {args.budget_s:g} s was spent"
        found[name] = prepared(name, args, device) if elapsed_s <= args.budget_s else spent
        print(f"{name}: compiled after {time.monotonic() - started:.1f} s", flush=True)
    passes = {name: calls for name, calls in found.items() if not isinstance(calls, str)}
    samples: dict[tuple[str, str], list[Sample]] = {(name, kind): [] for name in passes for kind in PASSES}
    for _ in range(ROUNDS):
        for name, kind in samples:
            measured = measure(passes[name][kind], device, warmup=WARMUP, steps=SAMPLES)
            samples[name, kind] += [sample for sample in measured if not sample.warmup]
    rows = [
        {"attention": name, "reason": calls} if isinstance(calls, str) else row_of(name, calls, samples)
        for name, calls in found.items()
    ]
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
