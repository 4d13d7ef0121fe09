"""Tables and verdicts from the measured errors of sums and normalizations in low precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict

from cs_systems.config import Precision
from cs_systems.core.tables import Column, table
from cs_systems.formulas import rounding
from cs_systems.record import RunRecord

VALUE = 0.01  # the addend of the workload `accumulation`
SHOWN_LENGTHS = (16, 256, 4096, 65536)


def _formats(row: rounding.AccumulationRow) -> tuple[rounding.Format, rounding.Format]:
    return rounding.FORMATS[Precision(row["addend"])], rounding.FORMATS[Precision(row["accumulator"])]


class SumRow(TypedDict):
    """Number added many times; `why` is derived by arithmetic, without a measurement."""

    variant: Annotated[str, Column("accumulator + addend")]
    count: Annotated[int, Column("times", form=",")]
    sum: Annotated[float, Column(form=",.4f")]
    error: Annotated[float, Column(form="+.2g")]
    why: str


class UlpRow(TypedDict):
    """Additions in one dtype while the sum is between two powers of 2."""

    dtype: str
    range: Annotated[str, Column("sum between")]
    ulp: Annotated[float, Column(form=".3g", note="ulp: unit in the last place")]
    addend_in_ulps: float
    added_in_ulps: float
    additions: int
    error: Annotated[float, Column(form="+.2g")]


class RandomSumsRow(TypedDict):
    """Median relative error of random sums by one method, by the number of terms."""

    dtype: str
    method: Annotated[str, Column("added up")]
    error: Annotated[dict[int, float], Column(form=".1e")]


class LowStepRow(TypedDict):
    """Error of an operation with one step in low precision, as text, by dtype."""

    operation: str
    case: Annotated[str, Column("input")]
    step: Annotated[str, Column("in low precision")]
    error: Annotated[dict[str, str], Column(note="u: unit roundoff")]


class FailingStepRow(TypedDict):
    """Input sizes at which one step in low precision fails, as text, by dtype; None if there is none."""

    operation: str
    step: Annotated[str, Column("in low precision")]
    fails: dict[str, str | None]


@table("sums of 0.01 added many times", "variant count sum error")
def accumulated(records: Sequence[RunRecord]) -> list[SumRow]:
    """Return rows for one number added many times."""
    rows = [row for record in records for row in rounding.ACCUMULATION.of(record.results)]
    return [
        {
            "variant": row["variant"],
            "count": row["count"],
            "sum": row["sum"],
            "error": row["error"],
            "why": rounding.why(VALUE, *_formats(row), row["count"]),
        }
        for row in rows
    ]


def reasons(rows: Sequence[SumRow]) -> list[str]:
    """Return each `why` of `accumulated` once, preceded by the sums that it explains."""
    groups: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        groups.setdefault(row["why"], {}).setdefault(row["variant"], []).append(f"{row['count']:,}")
    return [
        f"{' and '.join(names)}, {' and '.join(next(iter(names.values())))} times: {why}"
        for why, names in groups.items()
    ]


def unexplained(records: Sequence[RunRecord]) -> list[rounding.AccumulationRow]:
    """Return the sums that differ by any bit from the arithmetic of `rounding`; there should be none."""
    rows = [row for record in records for row in rounding.ACCUMULATION.of(record.results)]
    return [row for row in rows if row["sum"] != rounding.total(VALUE, *_formats(row), row["count"])]


@table("1000 × 0.01 in one dtype, by range of the running sum")
def ulps(records: Sequence[RunRecord], count: int = 1000) -> list[UlpRow]:
    """Return the sums of `count` additions in one dtype, binade by binade.

    They begin at 1, where errors become visible.
    """
    rows = [row for record in records for row in rounding.ACCUMULATION.of(record.results)]
    same = [row for row in rows if row["count"] == count and row["accumulator"] == row["addend"]]
    return [
        {
            "dtype": row["accumulator"],
            "range": f"{binade.low:g} … {binade.below:g}",
            "ulp": binade.ulp,
            "addend_in_ulps": round(binade.addend_in_ulps, 3),
            "added_in_ulps": round(binade.added_in_ulps, 3),
            "additions": binade.additions,
            "error": binade.error,
        }
        for row in same
        for binade in rounding.binades(VALUE, *_formats(row), count)
        if binade.low >= 1
    ]


@table("median relative error of random sums, by number of terms")
def summed(records: Sequence[RunRecord]) -> list[RandomSumsRow]:
    """Return the median relative error of random sums by dtype and method, for SHOWN_LENGTHS."""
    made: dict[tuple[str, str], RandomSumsRow] = {}
    for record in records:
        precision = record.config["precision"]
        for row in rounding.SUMMATION.of(record.results):
            line = made.setdefault(
                (precision, row["method"]), {"dtype": precision, "method": row["method"], "error": {}}
            )
            if row["length"] in SHOWN_LENGTHS:
                line["error"][row["length"]] = row["median_relative_error"]
    return [*made.values()]


def first_bad(rows: Sequence[rounding.SummationRow], method: str, roundoffs: float) -> int | None:
    """Return the shortest sum by that method with a median error above `roundoffs` unit roundoffs; None if none."""
    bad = (
        row["length"]
        for row in rows
        if row["method"] == method and row["median_relative_error"] > roundoffs * row["unit_roundoff"]
    )
    return min(bad, default=None)


@table("relative error by step in low precision")
def normalized(records: Sequence[RunRecord]) -> list[LowStepRow]:
    """Return the error of each single step in low precision, in unit roundoffs."""
    made: dict[tuple[str, str, str], LowStepRow] = {}
    for record in records:
        for row in rounding.NORMALIZATION.of(record.results):
            operation, case, step = row["operation"], row["case"], row["step"]
            line = made.setdefault(
                (operation, case, step), {"operation": operation, "case": case, "step": step, "error": {}}
            )
            line["error"][record.config["precision"]] = in_roundoffs(row)
    return [*made.values()]


def in_roundoffs(row: rounding.NormalizationRow) -> str:
    """Format the error of a row, such as `26.7 u`, with the share of results that are inf or NaN."""
    if row["error"] is None:
        return "inf or NaN"
    lost = "" if row["finite"] == 1 else f", {1 - row['finite']:.0%} inf or NaN"
    return f"{row['error'] / row['unit_roundoff']:.3g} u{lost}"


@table("inputs of mean 0 and standard deviation σ at which one low-precision step fails")
def ranges(records: Sequence[RunRecord]) -> list[FailingStepRow]:
    """Return the steps that fail at some size of the input; a step that never fails has no row."""
    made: dict[tuple[str, str], FailingStepRow] = {}
    for record in records:
        for row in rounding.NORMALIZATION_RANGE.of(record.results):
            operation, step = row["operation"], row["step"]
            line = made.setdefault((operation, step), {"operation": operation, "step": step, "fails": {}})
            line["fails"][record.config["precision"]] = _breaks(row)
    return [line for line in made.values() if any(line["fails"].values())]


def _breaks(row: rounding.NormalizationRangeRow) -> str | None:
    sentences = []
    if row["breaks_up_to"] is not None:
        sentences.append(f"σ ≤ {row['breaks_up_to']:g}")
    if row["breaks_from"] is not None:
        sentences.append(f"σ ≥ {row['breaks_from']:g}")
    return ", ".join(sentences) + (" (overflow)" if row["overflows"] else "") if sentences else None


ALL_STEPS, TORCH, WIDE = "all steps, sums ", "as torch does it", "fp32, result rounded"
GOOD_ENOUGH = 2.0  # unit roundoffs: with fp32 inside, half of one is left, and the difference is negligible


# rows of one operation and one kind of input, by the step that is in low precision
Steps = dict[str, rounding.NormalizationRow]


def _cases(record: RunRecord) -> dict[tuple[str, str], Steps]:
    cases: dict[tuple[str, str], Steps] = {}
    for row in rounding.NORMALIZATION.of(record.results):
        cases.setdefault((row["operation"], row["case"]), {})[row["step"]] = row
    return cases


def _whole(steps: Steps) -> Steps:
    """Return the rows with every step in low precision, by the order of summation."""
    return {name.removeprefix(ALL_STEPS): row for name, row in steps.items() if name.startswith(ALL_STEPS)}


def verdicts(record: RunRecord) -> list[str]:
    """Return sentences on the accuracy without fp32: a summary, then each operation and input."""
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
    """Return one sentence that lists the operations that need fp32 inside in this dtype; empty if none does."""
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
    """Return, for each operation, the steps that overflow the dtype and the input sizes from which they do."""
    precision, rows = record.config["precision"], rounding.NORMALIZATION_RANGE.of(record.results)
    sentences = []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        first: dict[str, float] = {}  # the smaller size of the two summation orders
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
