"""Tables and verdicts from the measured errors of sums and normalizations in low precision."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.config import Precision
from cs_systems.core.tables import Row
from cs_systems.formulas import rounding
from cs_systems.record import RunRecord

VALUE = 0.01  # the addend of the workload `accumulation`
SHOWN_LENGTHS = (16, 256, 4096, 65536)


def _formats(row: rounding.AccumulationRow) -> tuple[rounding.Format, rounding.Format]:
    return rounding.FORMATS[Precision(row["addend"])], rounding.FORMATS[Precision(row["accumulator"])]


def accumulated(records: Sequence[RunRecord]) -> list[Row]:
    """Return rows for one number added many times.

    `why` is computed by arithmetic alone, without a measurement.
    """
    rows = [row for record in records for row in rounding.ACCUMULATION.of(record.results)]
    return [
        {
            "accumulator + addend": row["variant"],
            "times": row["count"],
            "sum": f"{row['sum']:.4f}",
            "error": f"{row['error']:+.2g}",
            "why": rounding.why(VALUE, *_formats(row), row["count"]),
        }
        for row in rows
    ]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return each `why` of `accumulated` once, preceded by the sums that it explains."""
    groups: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        groups.setdefault(row["why"], {}).setdefault(row["accumulator + addend"], []).append(f"{row['times']:,}")
    return [
        f"{' and '.join(names)}, {' and '.join(next(iter(names.values())))} times: {why}"
        for why, names in groups.items()
    ]


def unexplained(records: Sequence[RunRecord]) -> list[rounding.AccumulationRow]:
    """Return the sums that differ by any bit from the arithmetic of `rounding`; there should be none."""
    rows = [row for record in records for row in rounding.ACCUMULATION.of(record.results)]
    return [row for row in rows if row["sum"] != rounding.total(VALUE, *_formats(row), row["count"])]


def ulps(records: Sequence[RunRecord], count: int = 1000) -> list[Row]:
    """Return the sums of `count` additions in one dtype, binade by binade.

    They begin at 1, where errors become visible.
    """
    rows = [row for record in records for row in rounding.ACCUMULATION.of(record.results)]
    same = [row for row in rows if row["count"] == count and row["accumulator"] == row["addend"]]
    return [
        {
            "dtype": row["accumulator"],
            "sum between": f"{binade.low:g} … {binade.below:g}",
            "ulp": f"{binade.ulp:.3g}",
            "addend in ulps": round(binade.addend_in_ulps, 3),
            "added in ulps": round(binade.added_in_ulps, 3),
            "additions": binade.additions,
            "error": f"{binade.error:+.2g}",
        }
        for row in same
        for binade in rounding.binades(VALUE, *_formats(row), count)
        if binade.low >= 1
    ]


def summed(records: Sequence[RunRecord]) -> list[Row]:
    """Return the median relative error of random sums by dtype and method, with a column per SHOWN_LENGTHS."""
    made: dict[tuple[str, str], dict[str, str | None]] = {}
    for record in records:
        precision = record.config["precision"]
        for row in rounding.SUMMATION.of(record.results):
            key = (precision, row["method"])
            line = made.setdefault(key, {"dtype": precision, "added up": row["method"]})
            if row["length"] in SHOWN_LENGTHS:
                line[f"{row['length']:,} terms"] = f"{row['median_relative_error']:.1e}"
    return [*made.values()]


def first_bad(rows: Sequence[rounding.SummationRow], method: str, roundoffs: float) -> int | None:
    """Return the shortest sum by that method with a median error above `roundoffs` unit roundoffs; None if none."""
    bad = (
        row["length"]
        for row in rows
        if row["method"] == method and row["median_relative_error"] > roundoffs * row["unit_roundoff"]
    )
    return min(bad, default=None)


def normalized(records: Sequence[RunRecord]) -> list[Row]:
    """Return the error of each single step in low precision, in unit roundoffs, with a column per dtype."""
    made: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        for row in rounding.NORMALIZATION.of(record.results):
            key = (row["operation"], row["case"], row["step"])
            line = made.setdefault(key, dict(zip(("operation", "input", "in low precision"), key, strict=True)))
            line[record.config["precision"]] = in_roundoffs(row)
    return [*made.values()]


def in_roundoffs(row: rounding.NormalizationRow) -> str:
    """Format the error of a row, such as `26.7 u`, with the share of results that are inf or NaN."""
    if row["error"] is None:
        return "inf or NaN"
    lost = "" if row["finite"] == 1 else f", {1 - row['finite']:.0%} inf or NaN"
    return f"{row['error'] / row['unit_roundoff']:.3g} u{lost}"


def ranges(records: Sequence[RunRecord]) -> list[Row]:
    """Return the steps that break at some size of the input, with that size by dtype.

    A step that never breaks has no row.
    """
    made: dict[tuple[str, str], dict[str, str | None]] = {}
    precisions = [record.config["precision"] for record in records if "normalization_range" in record.results]
    for record in records:
        for row in rounding.NORMALIZATION_RANGE.of(record.results):
            key = (row["operation"], row["step"])
            line = made.setdefault(key, {"operation": key[0], "in low precision": key[1]} | dict.fromkeys(precisions))
            line[record.config["precision"]] = _breaks(row)
    return [line for line in made.values() if any(line[p] for p in precisions)]


def _breaks(row: rounding.NormalizationRangeRow) -> str | None:
    sentences = []
    if row["breaks_up_to"] is not None:
        sentences.append(f"σ ≤ {row['breaks_up_to']:g}")
    if row["breaks_from"] is not None:
        sentences.append(f"σ ≥ {row['breaks_from']:g}")
    return ", ".join(sentences) + (" (overflow)" if row["overflows"] else "") if sentences else None


ALL_STEPS, TORCH, WIDE = "all steps, sums ", "as torch does it", "fp32, result rounded"
GOOD_ENOUGH = 2.0  # unit roundoffs: with fp32 inside, half of one is left, and the difference is negligible


Steps = dict[str, rounding.NormalizationRow]  # one operation on one kind of input, by the step in low precision


def _cases(record: RunRecord) -> dict[tuple[str, str], Steps]:
    cases: dict[tuple[str, str], Steps] = {}
    for row in rounding.NORMALIZATION.of(record.results):
        cases.setdefault((row["operation"], row["case"]), {})[row["step"]] = row
    return cases


def _whole(steps: Steps) -> Steps:
    """Return the rows in which every step is in low precision, by the order of the sums."""
    return {name.removeprefix(ALL_STEPS): row for name, row in steps.items() if name.startswith(ALL_STEPS)}


def verdicts(record: RunRecord) -> list[str]:
    """Return sentences on the accuracy without fp32 inside: a summary, then each operation and input."""
    precision, sentences = record.config["precision"], _answer(record)
    for (operation, case), steps in _cases(record).items():
        whole = _whole(steps)
        single = {name: row for name, row in steps.items() if not name.startswith((ALL_STEPS, TORCH, WIDE))}
        enough = [how for how, row in whole.items() if _roundoffs(row) <= GOOD_ENOUGH]
        need = f"needs no fp32 with {' or '.join(enough)} sums" if enough else "needs fp32 inside"
        parts = []
        for how, row in whole.items():
            others = tuple(order for order in whole if order != how)
            possible = [name for name in single if not name.endswith(others)]
            worst = max(possible, key=lambda name: _roundoffs(single[name])).removesuffix(f", {how}")
            parts.append(f"{in_roundoffs(row)} with {how} sums (mostly from {worst})")
        best = f", {in_roundoffs(steps[TORCH])} in torch's implementation" if TORCH in steps else ""
        sentences.append(
            f"{precision} {operation}, {case}: {need}; with every step in {precision} the error is "
            f"{', '.join(parts)}{best}"
        )
    return sentences + _range_verdicts(record)


def _answer(record: RunRecord) -> list[str]:
    """Return one sentence with the operations that need fp32 inside in this dtype; empty if none does."""
    need: dict[str, list[str]] = {}
    for (operation, case), steps in _cases(record).items():
        for how, row in _whole(steps).items():
            if _roundoffs(row) > GOOD_ENOUGH:
                need.setdefault(how, []).append(f"{operation} ({case})")
    if not need:
        return []
    parts = "; ".join(f"with {how} sums {', '.join(names)}" for how, names in need.items())
    return [f"{record.config['precision']} needs fp32 inside for errors up to {GOOD_ENOUGH:g} unit roundoffs: {parts}"]


def _range_verdicts(record: RunRecord) -> list[str]:
    """Return, by operation, the steps that overflow the dtype and the input sizes from which they do."""
    precision, rows = record.config["precision"], rounding.NORMALIZATION_RANGE.of(record.results)
    sentences = []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        first: dict[str, float] = {}  # the smaller size of a sum's two orders
        for row in rows:
            if row["operation"] == operation and row["overflows"] and row["breaks_from"] is not None:
                step = row["step"].partition(",")[0]
                first[step] = min(row["breaks_from"], first.get(step, row["breaks_from"]))
        steps = ", ".join(f"σ = {first[step]:g} ({step})" for step in sorted(first, key=lambda step: first[step]))
        sentences.append(
            f"{precision} {operation}: " + (f"overflows from {steps} on" if steps else "does not overflow")
        )
    return sentences


def _roundoffs(row: rounding.NormalizationRow) -> float:
    """Return the error of a row in unit roundoffs; infinite if any result is inf or NaN."""
    return float("inf") if row["error"] is None or row["finite"] < 1 else float(row["error"] / row["unit_roundoff"])


def where(records: Sequence[RunRecord]) -> list[str]:
    """Return a sentence for each device on which the records were measured."""
    found = dict.fromkeys(
        (r.environment.device_name, r.environment.device) for r in records if r.status == "ok" and r.environment
    )
    return [f"measured on {name}{', a CPU' if device == 'cpu' else ''}" for name, device in found]
