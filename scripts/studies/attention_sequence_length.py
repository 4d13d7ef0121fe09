"""Time, TFLOP/s and peak memory of attention over sequence lengths.

Question: from length 8 to 512, where does FlashAttention begin to pay, and why was the shortest length the slowest?
Method: batch 32, 32 heads, embedding 2048 (d_head 64), causal, fp16; forward and backward by the device's clock
    with launches queued ahead, 30 samples, all of them kept.
Output: medians with their range, TFLOP/s, peak memory measured and predicted; outliers, clocks and the first step
    apart.
Why: One slow sample, the first call of its process, can decide a mean. Medians are shown, outliers are counted, and
    the mean that includes the first step is computed.

    python scripts/studies/attention_sequence_length.py
"""

from __future__ import annotations

from _attention import COLUMNS, FLASH2, PYTORCH, QUICK, by_backend, calls, exponent, one_bad_sample, speed_up
from _cells import Cell, place
from _study import Study, index, row_table, run

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.core import statistics
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

LENGTHS = (8, 16, 32, 64, 128, 256, 512)


def full() -> list[RunConfig]:
    return calls([AttentionShape(32, 32, seq, 64, causal=True) for seq in LENGTHS])


def small() -> list[RunConfig]:
    return calls([AttentionShape(2, 2, seq, 64, causal=True) for seq in LENGTHS], **QUICK)


def steadiness(cells: list[Cell]) -> list[Row]:
    rows = []
    for cell in cells:
        if cell.measured and cell.record.measurement:
            timed = cell.record.measurement.timed
            clocks = [s.sm_clock_hz for s in timed if s.sm_clock_hz]
            rows.append(
                {
                    "attention": cell["attention"],
                    "seq": cell["seq"],
                    "median_s": cell["median_s"],
                    "mean_s": cell["mean_s"],
                    "max_s": max(s.wall_s for s in timed),
                    "outliers": len(statistics.outliers([s.wall_s for s in timed])),
                    **one_bad_sample(cell),
                    "clock_low_hz": min(clocks, default=None),
                    "clock_high_hz": max(clocks, default=None),
                }
            )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = "steadiness: outliers among the samples, and the mean if the first (warm-up) step had been one of them"
    return [
        render([cell.record for cell in cells], format, ("attention", "seq", *COLUMNS)),
        *row_table(steadiness(cells), caption, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    for name, same in by_backend(cells).items():
        worst = max(same, key=lambda cell: one_bad_sample(cell)["mean_with_it_s"] / cell["mean_s"])
        first, mean = (human(one_bad_sample(worst)[name], "s") for name in ("first_s", "mean_with_it_s"))
        notes.append(
            f"{name}: the first step at length {worst['seq']} took {first}; counted as one of {worst['n']} samples it "
            f"would have made the mean {mean} where the median is {human(worst['median_s'], 's')}"
        )
        slow = [
            f"{row['outliers']} of {cell['n']} at {cell['seq']}"
            for cell in same
            for row in steadiness([cell])
            if row["outliers"]
        ]
        notes.append(f"{name}: outliers among the timed samples: {', '.join(slow) or 'none'}")
        long = same[len(same) // 2 :]
        if len(long) > 1:
            seqs = [cell["seq"] for cell in long]
            grows = exponent(seqs, [cell["median_s"] for cell in long])
            notes.append(f"{name}: from length {seqs[0]} to {seqs[-1]} the time grows as length^{grows:.2f}")
    return [*notes, *speed_up(cells, "seq")]


def answer(cells: list[Cell]) -> str:
    by = index(cells, "attention", "seq")
    seqs = sorted({seq for _, seq in by})
    both = [n for n in seqs if (PYTORCH, n) in by and (FLASH2, n) in by]
    if not both:
        return ""
    slower = [n for n in both if by[PYTORCH, n]["median_s"] <= by[FLASH2, n]["median_s"]]
    first = next((n for n in both if not slower or n > slower[-1]), None)
    where = "at no measured length" if first is None else f"from length {first} on"
    grows = []
    for name in (PYTORCH, FLASH2):
        ends = [by[name, n] for n in dict.fromkeys((both[0], both[-1]))]
        columns = {"median_s": "s", "model_flops_per_s": "flops_per_s", "peak_allocated_bytes": "bytes"}
        texts = [
            " to ".join(human(cell[column], unit) for cell in ends)
            for column, unit in columns.items()
            if None not in [cell[column] for cell in ends]
        ]
        grows.append(f"{', '.join(texts)} ({name})")
    longest = human(max(one_bad_sample(cell)["first_s"] for cell in by.values()), "s")
    return (
        f"{place(cells)}, from length {both[0]} to {both[-1]} time, rate and peak memory of forward and backward go "
        f"from {'; '.join(grows)}. {FLASH2} is faster than {PYTORCH} {where}. The first step of a cell takes up to "
        f"{longest}, which a mean over few samples would not hide."
    )


STUDY = Study(
    __file__,
    __doc__,
    "How do time, TFLOP/s and peak memory of attention grow with the sequence length?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
