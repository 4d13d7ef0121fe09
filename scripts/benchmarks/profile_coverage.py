"""Share of the kernel time that is given to a phase and to a layer, checked by two profilers.

Method: one training step of each size, in fp32 with naive attention and in bf16 with sdpa_flash, eager and under
torch.compile (--compile none default), recorded by nsys and by torch.profiler in a process each. Of each trace: its
coverage (the aim: over 98%, and over 90% compiled), and the share of kernels that are fused over several layers, of
which each belongs to one; of each pair: kernels of a step and shares of time by phase; of torch.profiler's: the share
of kernel time that autograd's sequence numbers, the independent route, give to another layer.
Output: a markdown table on standard output; the records with all tables under --out, the traces beside them
(ignored by git). Committed: profiles/profile_coverage/.

    python scripts/benchmarks/profile_coverage.py --out profiles/profile_coverage
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cs_systems
from cs_systems.analysis.attribution.attribution_check import check
from cs_systems.analysis.attribution.places import attribute
from cs_systems.cli._progress import progress_lines
from cs_systems.cli.profile import print_profile
from cs_systems.config import COMPILE_MODES, RunConfig, describe, preset
from cs_systems.readers._read import read
from cs_systems.record import RunRecord, read_records

COLUMNS = (
    *("cell", "profiler", "kernels/step", "kernel ms/step", "of a phase", "of a layer", "of several"),
    *("forward", "loss", "backward", "optimizer", "wrong by sequence number", "recorded : not recorded"),
)


def cells(
    sizes: Sequence[str], context: int, steps: int, profilers: Sequence[str], compile_modes: Sequence[str]
) -> list[RunConfig]:
    base = RunConfig(warmup=5, steps=steps)
    models = [replace(preset(size), context_length=max(context, preset(size).context_length)) for size in sizes]
    runs = [
        replace(base, model=model, seq_len=context, precision=precision, attention=attention, compile=mode)  # type: ignore[arg-type]
        for model in models
        for mode in compile_modes
        for precision, attention in (("fp32", "naive"), ("bf16", "sdpa_flash"))
    ]
    return [replace(run, profiler=name) for run in runs for name in profilers]


def row(record: RunRecord, folder: Path) -> list[str]:
    """Return the record's cells under COLUMNS."""
    cell = describe(replace(record.run_config, profiler="none"), without=("mode",))
    if "coverage" not in record.results:
        reason = record.reason or next((w.message for w in record.warnings if w.code == "no-tables"), "")
        return [cell, record.run_config.profiler, f"{record.status}: {reason}"]
    (coverage,), (cost,) = record.results["coverage"], record.results["overhead"]
    shares = {r["phase"]: r["share"] for r in record.results["phases"] if r["family"] == "all"}
    return [
        cell,
        coverage["profiler"],
        f"{coverage['kernels'] / coverage['steps']:.0f}",
        f"{coverage['kernel_s'] / coverage['steps'] * 1e3:.3f}",
        f"{coverage['phase_coverage']:.2%}",
        f"{coverage['layer_coverage']:.2%}",
        f"{coverage['fused_share']:.1%}",
        *(f"{shares.get(phase, 0):.1%}" for phase in ("forward", "loss", "backward", "optimizer")),
        wrong(folder / record.artifacts["trace"]) if "trace" in record.artifacts else "",
        "" if cost["recorded_to_not_recorded"] is None else f"{cost['recorded_to_not_recorded']:.2f}",
    ]


def wrong(path: Path) -> str:
    """Return the share of kernel time that sequence numbers attribute to another layer, of the time that they cover."""
    trace = read(path)
    found = check(trace, attribute(trace))
    share = found.wrong_share
    return "nothing checked" if share is None else f"{share:.2%} of {found.checked_kernels} kernels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records and traces")
    parser.add_argument("--size", nargs="+", default=["small", "xl"])
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--with", nargs="+", default=["nsys", "kineto"], dest="profilers")
    parser.add_argument("--compile", nargs="+", default=["none"], choices=COMPILE_MODES, dest="modes")
    parser.add_argument("--tables", action="store_true", help="print the tables of every trace too")
    args = parser.parse_args()
    configs = cells(args.size, args.context_length, args.steps, args.profilers, args.modes)
    for _ in cs_systems.sweep(configs, out=args.out, on_progress=lambda p: sys.stderr.writelines(progress_lines(p))):
        pass
    records = read_records(args.out)[0]
    if args.tables:
        for record in records:
            print_profile(record, args.out)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for record in records:
        print("| " + " | ".join(row(record, args.out)) + " |")


if __name__ == "__main__":
    main()
