"""Predicted peak memory compared with the peak measured on a GPU, with the cells that do not fit.

Method: every preset × context 128 … 2048 × fp32 and bf16 × {naive, flash, flash under checkpoints} × {forward, training
step}, batch 4; one step as warm-up (the optimizer makes its state in it) and one more, the most telling cells first.
Nothing is left out for being predicted not to fit: such a cell must end in an observed oom. Flash is sdpa_flash, in
fp32 sdpa_efficient, which needs no compiling. The prediction is made by the code that makes the table; none of its
constants is fitted to a measurement. `seen` are the cells that were looked at one by one while the formulas were
written and corrected: small and medium, and training with naive attention to context 1024. All others are held out: a
correction comes from PyTorch's sources and the seen cells, and the held-out ones are summed up after it. The last one
came when 227 cells had been measured.
Output: a markdown table and what it says; table.md and records.jsonl under --out. The same command goes on with what
is missing, also with other code: a peak of memory is the same whatever predicts it, and each record tells the code
that measured it. Another torch or device is refused. Committed: profiles/memory_prediction/.

    python scripts/benchmarks/memory_prediction.py --budget-s 240
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from cs_systems.config import PRESETS, ConfigError, Mode, Precision, RunConfig, describe, preset
from cs_systems.formulas.memory.fit import algorithm_of
from cs_systems.formulas.memory.model import step_memory
from cs_systems.measure.runtime.journal import Journal
from cs_systems.measure.runtime.sweep import preflight, sweep
from cs_systems.record import DONE, Row, RunRecord, append_record, read_records, records_path
from cs_systems.report.tables.rows import render_rows

# Held-out cells first, the largest before the small ones; a time budget leaves out the cells at the end.
SIZES = ("2.7B", "xl", "large", "8B", "10B", "medium", "small")
# Each kind of cell once for every size, so that every size comes early; fp32 at long contexts takes the longest.
ORDER = (
    *((2048, Precision.BF16), (512, Precision.FP32), (128, Precision.BF16), (128, Precision.FP32)),
    *((1024, Precision.BF16), (2048, Precision.FP32), (512, Precision.BF16), (1024, Precision.FP32)),
    *((256, Precision.BF16), (256, Precision.FP32)),
)
FLASH = {Precision.FP32: "sdpa_efficient", Precision.BF16: "sdpa_flash"}
CHECKPOINTS = ("every:1", "every:4", "selective:matmul")
BASE = RunConfig(device="cuda", warmup=1, steps=1)
AIM = 0.05
SEEN_SIZES = ("small", "medium")
CELL_TIMEOUT_S = 60.0


def cells() -> list[RunConfig]:
    return [
        replace(cell, model=replace(preset(size), context_length=context))
        for context, precision in ORDER
        for size in SIZES
        for cell in _ways(precision)
    ]


def _ways(precision: Precision) -> Iterator[RunConfig]:
    flash = replace(BASE, precision=precision, attention=FLASH[precision])
    naive = replace(BASE, precision=precision, attention="naive")
    yield from (flash, naive)
    yield from (replace(flash, checkpoint=checkpoint) for checkpoint in CHECKPOINTS)
    yield from (replace(flash, mode=Mode.FORWARD), replace(naive, mode=Mode.FORWARD))


def is_seen(config: RunConfig) -> bool:
    """Return True if the cell was examined while the formulas were written."""
    like_c2 = config.attention == "naive" and config.mode is Mode.TRAIN_STEP and config.tokens_per_sequence <= 1024
    return config.model.name in SEEN_SIZES or (like_c2 and config.model.name in ("large", "xl", "2.7B"))


def predicted_bytes(config: RunConfig) -> int:
    return step_memory(config, algorithm_of(config)).peak_bytes


def rows(records: Sequence[RunRecord]) -> list[Row]:
    """Return rows {size, context, …, predicted_bytes, measured_bytes, error}; an oom has neither peak nor error."""
    found = []
    for record in records:
        config, predicted = record.run_config, predicted_bytes(record.run_config)
        measured = record.measurement.peak_allocated_bytes if record.measurement else None
        found.append(
            {
                "size": config.model.label,
                "context": config.tokens_per_sequence,
                "precision": config.precision.value,
                "attention": config.attention,
                "checkpoint": config.checkpoint,
                "mode": config.mode.value,
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                "error": predicted / measured - 1 if measured else None,
                "held out": "no" if is_seen(config) else "yes",
                "result": record.status,
            }
        )
    order = {name: i for i, name in enumerate(PRESETS)}
    return sorted(found, key=lambda row: (order.get(row["size"], 99), row["context"], row["precision"], row["mode"]))


def shown(row: Row) -> Row:
    return row | {"error": "–" if row["error"] is None else f"{row['error']:+.2%}"}


def explain(records: Sequence[RunRecord]) -> list[str]:
    notes = [
        "not held out, for they were looked at one by one while the formulas were written, and corrected after the "
        "first 227 cells: small, medium, and training steps with naive attention of large, xl and 2.7B to context "
        "1024; the others were summed up alone"
    ]
    compared = [(row, record) for record in records for row in rows([record]) if row["error"] is not None]
    for name, group in (
        ("held out", [(r, c) for r, c in compared if r["held out"] == "yes"]),
        ("seen while the formulas were written", [(r, c) for r, c in compared if r["held out"] == "no"]),
    ):
        if group:
            errors = [abs(row["error"]) for row, _ in group]
            worst, record = max(group, key=lambda pair: abs(pair[0]["error"]))
            within = sum(error <= AIM for error in errors)
            notes.append(
                f"{name}: {within} of {len(group)} cells within {AIM:.0%}, half within {median(errors):.2%}; the worst "
                f"is {describe(record.run_config)}: {worst['error']:+.2%}"
            )
    ended = [record for record in records if record.status == "oom"]
    sure = [record for record in ended if predicted_bytes(record.run_config) > _device_bytes(record)]
    if ended:
        notes.append(f"{len(ended)} cells ended in an observed oom, {len(sure)} of them predicted not to fit")
        notes += [f"not predicted: {describe(r.run_config)} ran out of memory" for r in ended if r not in sure]
    wrong = [r for r, record in compared if r["predicted_bytes"] > _device_bytes(record)]
    notes.append(f"{len(wrong)} cells that were predicted not to fit did fit")
    failed = Counter((r.status, r.reason) for r in records if r.status not in ("ok", "oom"))
    return notes + [f"{count} cells: {status}: {reason}" for (status, reason), count in failed.items()]


def _device_bytes(record: RunRecord) -> int:
    return (record.environment and record.environment.device_memory_bytes) or sys.maxsize


def missing(records: Sequence[RunRecord]) -> list[RunConfig]:
    """Return the cells that have neither a peak nor an out-of-memory error yet, in order."""
    done = {record.run_config for record in records if record.status in DONE}
    return [config for config in cells() if config not in done]


def measure(out: Path, budget_s: float) -> None:
    """Add records to `out`. Raises ConfigError if the new ones come from another torch version or device."""
    known, began = read_records(out)[0] if records_path(out).exists() else [], time.monotonic()
    configs, origins = missing(known), {_origin(record) for record in known}
    print(f"{len(configs)} of {len(cells())} cells are missing", file=sys.stderr)
    for number, record in enumerate(sweep(configs, timeout_s=CELL_TIMEOUT_S), 1):
        if not {_origin(record)} >= origins:
            raise ConfigError(f"{out} holds records of {origins}, this is {_origin(record)}: choose another --out")
        append_record(out, record)
        print(f"[{number}/{len(configs)}] {describe(record.run_config)}: {record.status}", file=sys.stderr, flush=True)
        if time.monotonic() - began > budget_s:
            print(f"stopped after {budget_s:.0f} s; run the same command again to measure the rest", file=sys.stderr)
            return


def _origin(record: RunRecord) -> tuple[str, str] | None:
    return record.environment and (record.environment.torch, record.environment.device_name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiles/memory_prediction"))
    parser.add_argument("--budget-s", type=float, default=240.0, help="start no new cell after this many seconds")
    parser.add_argument("--show", action="store_true", help="print the table of the records in --out without measuring")
    args = parser.parse_args()
    if not args.show:
        (row,) = preflight([BASE])
        if row["reason"]:
            print(row["reason"], file=sys.stderr)
            return 3
        measure(Journal.prepare(args.out).folder, args.budget_s)
    records, _ = read_records(args.out)
    phrase = "\n".join(f"- {sentence}" for sentence in explain(records))
    caption = "peak memory: predicted, measured, and their ratio less 1"
    table = render_rows([shown(row) for row in rows(records)], "markdown", caption)
    text = f"# {str(__doc__).splitlines()[0].rstrip('.')}\n\n{phrase}\n\n{table.strip()}\n"
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
