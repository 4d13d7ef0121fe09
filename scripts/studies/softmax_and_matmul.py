"""Time of softmax and of the matrix products inside attention, compared with their FLOPs.

Question: for each score softmax does 3 operations (exponential, sum, division) and a product 2·d_head: 1/43 of them at
    a head size of 64. What is its time spent on?
Method: large (32 layers) at contexts 256 and 1024, naive attention, batch 4, fp32 and bf16, forward and
    backward: timed, and a second time under torch.profiler with ranges around scores, softmax and value. By formula
    each gets its FLOPs, the bytes that it must move at least, and the time that the device's ceilings leave for the
    longer of the two.
Output: of forward, a call's time of scores' product, softmax and value's product next to their ceilings; the kernels
    between them (scaling, masking, casts) apart; backward's time by part; an explanation, with the steps that were
    slow and what was recorded of them.
Why: FLOPs do not explain the time of softmax; bytes do. A slow step is listed with the cudaMalloc calls, the
    compilation or the first use that made it slow.

    python scripts/studies/softmax_and_matmul.py
"""

from __future__ import annotations

from _cells import Cell, place
from _kernels import clean, profiled, twin, twins, unknown
from _study import Study, row_table, run
from step_time import LARGE_OF_32_LAYERS, PRECISIONS

from cs_systems.analysis.attribution.tables import softmax_to_products
from cs_systems.analysis.comparison.warmup import warmup_curve
from cs_systems.config import Mode, Precision, RunConfig, grid
from cs_systems.core.units import human
from cs_systems.formulas.cost import COMPUTE_BYTES
from cs_systems.record import Row
from cs_systems.report.tables.records import render

BASE = RunConfig(mode=Mode.FORWARD_BACKWARD, warmup=3, steps=10)
CONTEXTS = (256, 1024)
# role of each part of naive attention; a kernel of another family in the part prepares or follows its product
WORK = {"attention.scores": "matmul", "attention.softmax": "softmax", "attention.value": "matmul"}
SLOW = 1.5  # times the median: such a step is an outlier
SOFTMAX_OPERATIONS = 3  # for each score: exponential, sum, division
SOFTMAX_BYTES = 4  # of a score that softmax reads or writes: autocast widens it to fp32


def full() -> list[RunConfig]:
    clocked = grid(BASE, model=[LARGE_OF_32_LAYERS], context_length=CONTEXTS, precision=PRECISIONS)
    return [*clocked, *profiled(clocked, "kineto")]


def small() -> list[RunConfig]:
    return grid(BASE, size=["tiny"], context_length=(32, 64), precision=PRECISIONS)


def work(config: RunConfig, part: str) -> tuple[int, int]:
    """Return (FLOPs, least bytes) of one forward call of a part: a product reads two operands and writes one, softmax
    reads the scores and writes the weights."""
    length, d_head = config.tokens_per_sequence, config.model.d_head
    heads = config.batch_size * config.model.num_heads
    scores, vectors = heads * length**2, heads * length * d_head
    if WORK[part] == "softmax":
        return SOFTMAX_OPERATIONS * scores, 2 * scores * SOFTMAX_BYTES
    return 2 * scores * d_head, (scores + 2 * vectors) * COMPUTE_BYTES[config.precision]


def attention_rows(cell: Cell, phase: str) -> list[Row]:
    return [row for row in cell.record.results.get("attention", ()) if row["phase"] == phase]


def calls(cells: list[Cell]) -> list[Row]:
    """Return one row per part of a forward call: its kernel's time and the least time by the device's ceilings."""
    found, rows = twins(cells), []
    for cell in clean(cells):
        if not cell.measured or not (other := twin(cell, found)):
            continue
        config, layers = cell.record.run_config, cell.record.run_config.model.num_layers
        for row in attention_rows(other, "forward"):
            if WORK.get(row["part"]) != row["family"]:
                continue
            flops, moved = work(config, row["part"])
            time_s = row["time_s"] / layers
            rows.append(
                {
                    "ctx": cell["seq_len"],
                    "precision": cell["precision"],
                    "part": row["part"].partition(".")[2],
                    "time_s": time_s,
                    "flops": flops,
                    "bytes": moved,
                    "achieved_flops_per_s": flops / time_s,
                    "achieved_bytes_per_s": moved / time_s,
                    **_roofline(cell, flops, moved, time_s),
                }
            )
    return rows


def _roofline(cell: Cell, flops: int, moved: int, time_s: float) -> Row:
    """Return the least time allowed by the ceilings that the record names; None if it names none."""
    ceiling = next(iter(cell.record.results.get("ceiling", ())), {})
    if not ceiling.get("peak_bytes_per_s"):
        return {"compute_s": None, "memory_s": None, "bound by": None, "of ceiling": None}
    compute, memory = flops / ceiling["peak_flops_per_s"], moved / ceiling["peak_bytes_per_s"]
    return {
        "compute_s": compute,
        "memory_s": memory,
        "bound by": "compute" if compute > memory else "memory",
        "of ceiling": f"{max(compute, memory) / time_s:.0%}",
    }


def inside(cells: list[Cell]) -> list[Row]:
    """Return one row per part and family of attention without projections: a layer's time, forward and backward."""
    rows = []
    found = twins(cells)
    for cell in clean(cells):
        if not cell.measured or not (other := twin(cell, found)):
            continue
        layers = cell.record.run_config.model.num_layers
        times: dict[tuple[str, str], Row] = {}
        for phase in ("forward", "backward"):
            for row in attention_rows(other, phase):
                if row["part"] in WORK:
                    times.setdefault((row["part"], row["family"]), {})[phase] = row
        for (part, family), by_phase in sorted(times.items(), key=lambda item: [*WORK].index(item[0][0])):
            rows.append(
                {
                    "ctx": cell["seq_len"],
                    "precision": cell["precision"],
                    "part": part.partition(".")[2],
                    "family": family,
                    **{
                        f"{phase}_{what}": row and row[column] / layers
                        for phase in ("forward", "backward")
                        for row in (by_phase.get(phase),)
                        for what, column in (("kernels", "calls_per_step"), ("s", "time_s"))
                    },
                }
            )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    parts = (
        "one forward call of attention: each part's own kernel; compute and memory: the least time that the device's "
        "ceilings leave for its FLOPs and for its bytes (over 100% of that: the L2 cache held some of the bytes)"
    )
    whole = "inside attention, of one layer: beside each part's own kernel what prepares or follows it"
    return [
        render([cell.record for cell in clean(cells)], format),
        *row_table(calls(cells), parts, format),
        *row_table(inside(cells), whole, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    timed = [cell for cell in clean(cells) if cell.measured]
    return [*_ratio(timed), *_to_products(cells), *_bytes(cells), *_between(cells), *_slow(timed), *unknown(cells)]


def _ratio(cells: list[Cell]) -> list[str]:
    if not cells:
        return []
    d_head = cells[0].record.run_config.model.d_head
    return [
        f"by formula softmax has {SOFTMAX_OPERATIONS} operations a score where a product has 2·{d_head}: "
        f"1/{2 * d_head / SOFTMAX_OPERATIONS:.0f} of the FLOPs"
    ]


def _to_products(cells: list[Cell]) -> list[str]:
    """Return sentences that compare the time of softmax and of the products in forward, without and with
    projections."""
    found = twins(cells)
    profiles = [(cell, other) for cell in clean(cells) if cell.measured and (other := twin(cell, found))]
    return [
        f"ctx {cell['seq_len']} {cell['precision']}: {note}"
        for cell, other in profiles
        for note in softmax_to_products("forward", attention_rows(other, "forward"))
    ]


def _bytes(cells: list[Cell]) -> list[str]:
    """Return sentences on softmax and both products: their times, bytes and ceilings."""
    rows = calls(cells)
    notes = []
    for length, precision in dict.fromkeys((row["ctx"], row["precision"]) for row in rows):
        by = {row["part"]: row for row in rows if (row["ctx"], row["precision"]) == (length, precision)}
        if not {"scores", "softmax", "value"} <= by.keys():
            continue
        scores, softmax, value = by["scores"], by["softmax"], by["value"]
        sentence = (
            f"ctx {length} {precision}: a call's softmax takes {human(softmax['time_s'], 's')}, the products "
            f"{human(scores['time_s'], 's')} (scores) and {human(value['time_s'], 's')} (value); softmax must move "
            f"{human(softmax['bytes'], 'bytes')}, scores {human(scores['bytes'], 'bytes')}"
        )
        if softmax["bound by"]:
            sentence += (
                f"; the ceilings leave it {human(max(softmax['compute_s'], softmax['memory_s']), 's')} "
                f"({softmax['bound by']}) and scores {human(max(scores['compute_s'], scores['memory_s']), 's')} "
                f"({scores['bound by']})"
            )
        notes.append(sentence)
    if rows and {row["bound by"] for row in rows if row["part"] == "softmax"} == {"memory"}:
        notes.append("by the ceilings, softmax is memory-bound in every cell, so its FLOPs do not predict its time")
    return notes


def _between(cells: list[Cell]) -> list[str]:
    """Return sentences on the kernels in forward that are neither a product nor softmax."""
    rows = inside(cells)
    notes = []
    for length, precision in dict.fromkeys((row["ctx"], row["precision"]) for row in rows):
        same = [r for r in rows if (r["ctx"], r["precision"]) == (length, precision) and r["forward_s"] is not None]
        between = [r for r in same if WORK[f"attention.{r['part']}"] != r["family"]]
        if not between:
            continue
        time, whole = (sum(r["forward_s"] for r in some) for some in (between, same))
        named = ", ".join(
            f"{r['part']} {r['family']} {human(r['forward_s'], 's')} in {r['forward_kernels']:.0f}" for r in between
        )
        notes.append(
            f"ctx {length} {precision}: scaling, masking and casts take {human(time, 's')} of a forward call, "
            f"{time / whole:.0%} of scores, softmax and value together ({named} kernels)"
        )
    return notes


def _slow(cells: list[Cell]) -> list[str]:
    """Return the slow steps by the clock, including warm-up, with their recorded causes."""
    notes = []
    for cell in cells:
        curve = warmup_curve(cell.record.measurement) if cell.record.measurement else []
        slow = [
            f"step {row['step'] + 1}{' (warm-up)' if row['warmup'] else ''} "
            f"{row['wall_s'] / cell['median_s']:.1f} times ({row['cause']})"
            for row in curve
            if row["cause"] and row["wall_s"] > SLOW * cell["median_s"]
        ]
        if slow:
            notes.append(f"{cell.label('attention', 'mode')}: slow steps, by the median step: {', '.join(slow)}")
    if cells and not notes:
        notes.append(f"no step, warm-up included, took over {SLOW} times its cell's median")
    return notes


def answer(cells: list[Cell]) -> str:
    rows = calls(cells)
    if not rows:
        return ""
    longest = max(row["ctx"] for row in rows)
    by = {(row["precision"], row["part"]): row for row in rows if row["ctx"] == longest}
    precision = Precision.BF16.value
    scores, softmax = by.get((precision, "scores")), by.get((precision, "softmax"))
    if not scores or not softmax:
        return ""
    bound = "memory bandwidth limits softmax" if softmax["bound by"] == "memory" else "compute limits softmax"
    return (
        f"{place(cells)}, {bound}: at context {longest} in bf16 the softmax of one attention call must move "
        f"{human(softmax['bytes'], 'bytes')} and takes {human(softmax['time_s'], 's')}, the product of the scores "
        f"{human(scores['bytes'], 'bytes')} and {human(scores['time_s'], 's')}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "Why does softmax take about as long as the matrix products inside attention, with so few of their FLOPs?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="phases",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
