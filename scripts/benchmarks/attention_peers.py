"""Time of the toolkit's attention compared with its peers, call by call.

Method: ten shapes, causal and not, bf16; forward and backward through each backend's public function and autograd, each
phase by device events with the launches hidden and the L2 cache cleared before each step; the backends of a shape one
after the other, in one process. --lengths instead: 16,384 tokens and a width of 2048, from 32 sequences of 512 to one.
Output: records.jsonl in --out, and a markdown table: milliseconds of forward, backward, and both, medians; then in how
many rows the first backend is at or below each other. Of lengths also a figure for each head size, causal and not:
credited FLOP/s of both passes along the length, under the device's ceiling.

    python scripts/benchmarks/attention_peers.py --out runs/attention_peers
    python scripts/benchmarks/attention_peers.py --lengths --causal yes --out runs/attention_lengths
    python scripts/benchmarks/attention_peers.py --attention flash_cuda sdpa_cudnn --rows 4,16,4096,64 --out runs/one
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from cs_systems.config import AttentionShape, ConfigError, Mode, Precision, RunConfig
from cs_systems.measure.runtime.sweep import sweep
from cs_systems.record import RunRecord
from cs_systems.report.figures.plot import save
from cs_systems.report.tables.rows import render_rows

BACKENDS = ["flash_cuda", "flash_attn", "sdpa_cudnn", "sdpa_flash"]
ROWS = [
    *("4,16,1024,64", "4,16,4096,64", "1,16,16384,64", "4,32,2048,80", "4,16,4096,128", "2,16,8192,128"),
    *("1,32,16384,128", "4,8,1024,256", "4,8,4096,256", "1,8,16384,256"),
]
TOKENS, WIDTH = 16384, 2048
LENGTHS = [f"{TOKENS // n},{WIDTH // d},{n},{d}" for d in (64, 128) for n in (512, 1024, 2048, 4096, 8192, 16384)]
PHASES = ("forward", "backward", "step")
CELL_TIMEOUT_S = 60.0
CELL_FLOPS = 1.2e14  # about a third of a second of work on a Hopper GPU; limits the number of steps of a cell


def steps_of(shape: AttentionShape) -> int:
    flops = 14 * shape.batch * shape.heads * shape.seq**2 * shape.d_head / (2 if shape.causal else 1)
    return max(10, min(50, int(CELL_FLOPS / flops)))


def configs(rows: Sequence[str], causals: Sequence[bool], backends: Sequence[str]) -> list[RunConfig]:
    base = RunConfig(
        workload="attention", mode=Mode.FORWARD_BACKWARD, precision=Precision.BF16, l2="clear", warmup=3, steps=10
    )
    shapes = [AttentionShape(*map(int, row.split(",")), causal=c) for c in causals for row in rows]
    cells = [(shape, name) for shape in shapes for name in backends]
    return [replace(base, shape=shape, attention=name, steps=steps_of(shape)) for shape, name in cells]


def times_ms(record: RunRecord) -> list[float] | None:
    if record.measurement is None:
        return None
    return [1e3 * median(record.measurement.durations_s(phase)) for phase in PHASES]


def table(records: Sequence[RunRecord], first: str) -> str:
    rows: dict[str, dict[str, str]] = {}
    both: dict[str, dict[str, float]] = {}
    for record in records:
        shape = record.run_config.shape or AttentionShape()
        label = f"{shape.batch},{shape.heads},{shape.seq},{shape.d_head}{' causal' if shape.causal else ''}"
        found = times_ms(record)
        cell = " ".join(f"{ms:.3f}" for ms in found) if found else record.status
        rows.setdefault(label, {"batch,heads,seq,d_head": label})[record.run_config.attention] = cell
        if found:
            both.setdefault(record.run_config.attention, {})[label] = found[-1]
    caption = "ms of forward, backward, and both; bf16, medians, L2 cache cleared, launches hidden"
    notes = []
    for other, theirs in both.items():
        shared = [(ms, theirs[row]) for row, ms in both.get(first, {}).items() if row in theirs]
        if other != first and shared:
            won = sum(ours <= peer for ours, peer in shared)
            notes.append(f"{first} is at or below {other} in {won} of {len(shared)} rows")
    titles = {name: name for row in rows.values() for name in row}
    return "\n".join([render_rows(list(rows.values()), "markdown", caption, titles=titles), *notes])


def draw(records: Sequence[RunRecord], out: Path) -> None:
    """Draw one figure for each kind of problem, with a curve for each backend."""
    kinds: dict[str, list[RunRecord]] = {}
    for record in records:
        if (shape := record.run_config.shape) and record.measurement:
            kinds.setdefault(f"d{shape.d_head}{'_causal' if shape.causal else ''}.svg", []).append(record)
    for name, chosen in kinds.items():
        save(chosen, out / name, "rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=BACKENDS)
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--rows", nargs="+", default=ROWS, help="shapes: batch,heads,seq,d_head")
    rows.add_argument(
        "--lengths", dest="rows", action="store_const", const=LENGTHS, help="vary the length, and draw figures"
    )
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    causals = {"yes": [True], "no": [False], "both": [True, False]}[args.causal]
    asked = configs(args.rows, causals, args.attention)
    records = []
    try:
        for record in sweep(asked, out=args.out, timeout_s=CELL_TIMEOUT_S):
            if record.status != "ok":
                print(f"{record.run_config.attention}: {record.status}: {record.reason}", flush=True)
            records.append(record)
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted: the table has what was measured")
    if any(record.measurement for record in records):
        print(table(records, args.attention[0]))
        if args.rows is LENGTHS:
            draw(records, args.out)


if __name__ == "__main__":
    main()
