"""Our FlashAttention kernel compared with naive attention, from length 128 to 65,536.

Question: from which length on does tiling pay, how do time and memory grow, and what does precision change?
Method: batch 1, one head, causal, length 128 … 65536 × d_head 16 … 128 × {bf16, fp32}; forward and backward, each
    timed by the device's clock with launches queued ahead: flash_triton, naive, and torch's sdpa_flash (which takes
    no fp32).
Output: cross tables of forward, backward, both, and peak memory; the exponents with which time and memory grow.
Why: A cell that does not fit is a row with its predicted bytes.

    python scripts/studies/flash_attention_lengths.py
"""

from __future__ import annotations

from itertools import groupby

from _attention import FLASH2, PYTORCH, QUICK, by_backend, calls, exponent, growth, speed_up
from _cells import Cell, place
from _study import Study, index, run

from cs_systems.config import AttentionShape, Precision, RunConfig
from cs_systems.core.statistics import ratio_interval
from cs_systems.core.units import human
from cs_systems.report.tables.records import render

OURS = "flash_triton"
BACKENDS = (OURS, PYTORCH, FLASH2)
LENGTHS = tuple(2**n for n in range(7, 17))
D_HEADS = (16, 32, 64, 128)
PRECISIONS = (Precision.BF16, Precision.FP32)
ANSWERED_D_HEAD = 64
VALUES = ("forward.median_us", "backward.median_us", "median_us", "peak_allocated_mib")


def full() -> list[RunConfig]:
    shapes = [AttentionShape(1, 1, seq, d, causal=True) for d in D_HEADS for seq in LENGTHS]
    return [c for p in PRECISIONS for c in calls(shapes, BACKENDS, precision=p, warmup=3, steps=10)]


def small() -> list[RunConfig]:
    """Return cells for a CPU: flash_torch shows the algorithm, and flash_triton's rows give their reason."""
    shapes = [AttentionShape(1, 1, seq, 16, causal=True) for seq in LENGTHS[:4]]
    backends = (OURS, "flash_torch", PYTORCH, FLASH2)
    return [c for p in PRECISIONS for c in calls(shapes, backends, precision=p, **QUICK)]


def tables(cells: list[Cell], format: str) -> list[str]:
    records = [cell.record for cell in cells]
    return [render(records, format, pivot=f"seq,d_head:precision,attention:{value}") for value in VALUES]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    for name, same in by_backend(cells).items():
        for precision in dict.fromkeys(cell["precision"] for cell in same):
            d_head = max(cell["d_head"] for cell in same)
            line = [cell for cell in same if (cell["precision"], cell["d_head"]) == (precision, d_head)]
            if len(line) > 3:
                notes.append(_growth(f"{name} {precision} d_head {d_head}", sorted(line, key=lambda cell: cell["seq"])))
    return [*notes, *_crossover(cells), *speed_up(cells, "precision", "d_head", "seq")]


def _growth(what: str, line: list[Cell]) -> str:
    """Return a sentence on the growth exponents over the longer half of the lengths, without the constant memory."""
    long = line[len(line) // 2 :] if len(line) > 5 else line
    seqs = [cell["seq"] for cell in long]
    measured = all(cell["peak_allocated_bytes"] for cell in long)
    column = "peak_allocated_bytes" if measured else "predicted_peak_bytes"
    kind = "peak memory" if measured else "predicted peak memory (the measured one is unknown on this device)"
    memory = growth(seqs, [cell[column] for cell in long])
    time = exponent(seqs, [cell["median_s"] for cell in long])
    return f"{what}: from length {seqs[0]} to {seqs[-1]} {kind} grows as length^{memory:.2f}, time as length^{time:.2f}"


def _crossover(cells: list[Cell]) -> list[str]:
    """Return the lengths at which our kernel is faster or slower than naive, by `compare`'s verdict."""
    by = index(cells, "attention", "precision", "d_head", "seq")
    notes = []
    for precision, d_head in dict.fromkeys(key[1:3] for key in by if key[0] == OURS):
        ours, naive = (OURS, precision, d_head), (PYTORCH, precision, d_head)
        lengths = sorted(key[3] for key in by if key[:3] == ours and (*naive, key[3]) in by)
        verdicts = {n: _verdict(by[*naive, n], by[*ours, n]) for n in lengths}
        found = "; ".join(f"{v} at length {_ranges(lengths, verdicts, v)}" for v in dict.fromkeys(verdicts.values()))
        if found:
            notes.append(f"{OURS} {precision} d_head {d_head} against {PYTORCH}: {found}")
    return notes


def _verdict(baseline: Cell, cell: Cell) -> str:
    a, b = (m.durations_s("step") for c in (baseline, cell) if (m := c.record.measurement))
    return ratio_interval([[a]], [[b]]).verdict


def _ranges(lengths: list[int], verdicts: dict[int, str], verdict: str) -> str:
    """Return the lengths with a verdict as ranges: `128 to 1024, 4096`."""
    runs = [[*run] for same, run in groupby(lengths, lambda n: verdicts[n] == verdict) if same]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def answer(cells: list[Cell]) -> str:
    by = index(cells, "attention", "precision", "d_head", "seq")
    shared = [key[1:] for key in by if key[0] == OURS and (PYTORCH, *key[1:]) in by and key[2] <= ANSWERED_D_HEAD]
    shared = [key for key in shared if key[0] == Precision.BF16]
    if not shared:
        return ""
    precision, d_head, seq = max(shared, key=lambda key: key[1:])
    ours, naive = by[OURS, precision, d_head, seq], by[PYTORCH, precision, d_head, seq]
    shortest = min(length for *same, length in shared if same == [precision, d_head])
    faster = []
    for n in dict.fromkeys((shortest, seq)):
        speed_up = by[PYTORCH, precision, d_head, n]["median_s"] / by[OURS, precision, d_head, n]["median_s"]
        faster.append(f"{speed_up:.1f} at length {n:,}")
    text = (
        f"{place(cells)}, the speed-up of {OURS} over {PYTORCH} in forward and backward ({precision}, d_head {d_head}) "
        f"is {' and '.join(faster)}"
    )
    if ours["peak_allocated_bytes"] and naive["peak_allocated_bytes"]:
        peaks = [human(cell["peak_allocated_bytes"], "bytes") for cell in (ours, naive)]
        text += f", with a peak memory of {peaks[0]} instead of {peaks[1]}"
    return f"{text}."


STUDY = Study(
    __file__,
    __doc__,
    "How does our FlashAttention kernel compare with naive attention, from length 128 to 65,536?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
    drawn=lambda cell: cell["d_head"] in (16, 64) and cell["precision"] == Precision.BF16,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
