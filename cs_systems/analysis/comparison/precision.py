"""Comparison of each precision with fp32: speed, numerical error, and learning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, TypedDict, cast

from cs_systems.analysis.comparison.runs import compare
from cs_systems.config import Precision, RunConfig, describe
from cs_systems.core.fields import Subject
from cs_systems.core.statistics import quotient
from cs_systems.core.tables import Column, Table, first_row
from cs_systems.formulas.cost import COST
from cs_systems.formulas.rank_layout import data_ranks
from cs_systems.record import RunRecord, declared_by, median_s

BASELINE = Precision.FP32
PHASES = ("forward", "loss", "backward", "synchronize", "optimizer")


class PrecisionErrorRow(TypedDict):
    """Relative errors of a step in low precision, in `precision_error`; None where an overflow made it infinite."""

    reference: str | None  # dtype of the reference; None in a row without a measurement
    loss_scale: float | None  # factor on the loss before backward; None without scaling
    logits_error: Annotated[float | None, Column("logits", form=".1e")]
    loss_error: Annotated[float | None, Column("loss", form=".1e")]
    gradient_error: Annotated[float | None, Column("gradients", form=".1e")]
    worst_parameter: str | None
    worst_parameter_error: Annotated[float | None, Column("worst parameter's", form=".1e")]
    # share of the gradient elements that are not 0 in the reference
    underflow_share: Annotated[float | None, Column("underflow")]
    nonfinite_share: Annotated[float | None, Column("not finite")]  # share of the gradient elements


class TrainingCurveRow(TypedDict):
    """Training step, in `training_curve`."""

    step: int
    loss: float  # before the step's update
    loss_scale: float | None  # loss scale of the step, for fp16
    skipped: bool  # whether the update was skipped because a gradient overflowed


class Speedup(TypedDict):
    """Speed-up of a step compared with fp32, with its interval (`statistics.ratio_interval`).

    None if one of the two was not timed, or has a loss that is NaN or infinite.
    """

    speedup: float | None
    speedup_low: float | None  # also None if the times are too noisy to detect a doubling
    speedup_high: float | None
    verdict: str | None
    noise: str | None


class GainRow(Speedup):
    """Step of a cell in one precision: medians of the step and of its phases; the steps' ratio is the speed-up."""

    precision: str
    forward_s: Annotated[float | None, Column("fwd")]
    loss_s: float | None
    backward_s: Annotated[float | None, Column("bwd")]
    synchronize_s: Annotated[float | None, Column("sync")]
    optimizer_s: Annotated[float | None, Column("opt")]
    step_s: float | None
    tokens_per_s: float | None  # tokens of all ranks
    peak_allocated_bytes: Annotated[int | None, Column("peak")]
    mfu: Annotated[float | None, Column("MFU")]  # relative to the peak of the row's own precision
    status: str
    reason: str | None


class ErrorRow(PrecisionErrorRow):
    """Errors of a step in one precision, with the record's status."""

    precision: str
    status: str
    reason: str | None


class LearningRow(TypedDict):
    """Training of a cell in one precision."""

    precision: str
    steps: int | None
    first_loss: Annotated[float | None, Column(form=".4f")]
    # The mean over the last tenth of the steps, because each step has its own batch.
    last_loss: Annotated[float | None, Column("last 10%", form=".4f")]
    # deviation from fp32's loss at the same step; None for fp32, and if fp32 was not measured
    largest_deviation: float | None
    at_step: int | None
    loss_scale: str | None  # history of the loss scale, as text
    skipped: int | None
    status: str
    reason: str | None


ITSELF = cast(Speedup, dict.fromkeys(Speedup.__annotations__))  # fp32 is no faster than fp32
NO_ERRORS = cast(PrecisionErrorRow, dict.fromkeys(PrecisionErrorRow.__annotations__))
HOPELESS = 1.0  # with a coarser resolution, even a doubling could not be detected
TIMED, ERRORS, CURVES = Subject.STEP, Subject.ERRORS, Subject.CURVE


def by_cell(records: Iterable[RunRecord], workload: str) -> dict[RunConfig, dict[Precision, list[RunRecord]]]:
    """Return cell (in fp32) → precision, in the order of `Precision` → its records (repeats), without a profiler."""
    mine = [record for record in records if _role(record) == workload]
    cells: dict[RunConfig, dict[Precision, list[RunRecord]]] = {}
    for record in sorted(mine, key=lambda r: list(Precision).index(r.run_config.precision)):
        cell = replace(record.run_config, precision=BASELINE, warmup=0, warmup_s=0.0, steps=1, steps_s=0.0, rounds=1)
        cells.setdefault(cell, {}).setdefault(record.run_config.precision, []).append(record)
    return cells


def _role(record: RunRecord) -> str | None:
    """Return TIMED, ERRORS or CURVES; a user's own model is TIMED, or under a profiler that compares two steps."""
    is_own = record.subject is Subject.OWN
    if record.is_profiled:
        return ERRORS if is_own and declared_by(record.config["profiler"]).get("compares") else None
    return TIMED if is_own else record.subject


def name_of(cell: RunConfig) -> str:
    """Return a description of the cell for any workload, without the precision."""
    silent = {"precision", "profiler"} if cell.subject is TIMED else {"precision", "profiler", "mode"}
    return describe(cell if cell.subject is Subject.OWN else replace(cell, workload=TIMED), silent)


def gains(found: dict[Precision, list[RunRecord]]) -> list[GainRow]:
    """Return a row for each precision of one cell."""
    return [_gain(precision, records, found.get(BASELINE, [])) for precision, records in found.items()]


def _gain(precision: Precision, records: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> GainRow:
    timed = [r for r in records if r.is_timing]
    times = {phase: median_s(timed, phase) for phase in PHASES}
    step_s = median_s(timed)
    last = (timed or records)[-1]
    caveats = "; ".join(w.message for w in last.warnings) if not timed and last.measurement else None
    peaks = [r.measurement.peak_allocated_bytes for r in timed if r.measurement]
    peak = first_row(last.results, "ceiling")
    tokens = first_row(last.results, "ran").get("tokens")  # tokens of one rank
    return {
        "precision": precision.value,
        "forward_s": times["forward"],
        "loss_s": times["loss"],
        "backward_s": times["backward"],
        "synchronize_s": times["synchronize"],
        "optimizer_s": times["optimizer"],
        "step_s": step_s,
        **(speedup([r for r in baseline if r.is_timing], timed) if precision is not BASELINE else ITSELF),
        "tokens_per_s": quotient(tokens and tokens * data_ranks(last.config), step_s),
        "peak_allocated_bytes": max((p for p in peaks if p is not None), default=None),
        "mfu": quotient(quotient(_step_flops(last), step_s), peak.get("peak_flops_per_s")),
        "status": last.status,
        "reason": last.reason or caveats,
    }


def speedup(baseline: Sequence[RunRecord], timed: Sequence[RunRecord]) -> Speedup:
    """Return the speed-up of a step, from clean records of one cell."""
    if not timed or not baseline:
        return ITSELF
    (found,) = compare(baseline, timed).rows
    noisy = found["resolution"] is not None and found["resolution"] > HOPELESS
    low, high = (None, None) if noisy else (found["ratio_low"], found["ratio_high"])
    return {
        "speedup": 1 / found["ratio"],
        "speedup_low": high and 1 / high,
        "speedup_high": low and 1 / low,
        "verdict": "too noisy" if noisy else found["verdict"],
        "noise": found["noise"],
    }


def interval(row: Speedup) -> str | None:
    """Return the interval of the speed-up in words; None without a comparison with fp32."""
    low, high = row["speedup_low"], row["speedup_high"]
    return f"{low:.2f}–{high:.2f}" if low and high else row["verdict"]


def _step_flops(record: RunRecord) -> float | None:
    return next((row["model_flops"] for row in COST.of(record.results) if row["phase"] == "step"), None)


def errors(found: dict[Precision, list[RunRecord]]) -> list[ErrorRow]:
    """Return the rows of the table `precision_error` for one cell, with the precision and its status.

    The first row of fp16 is without a loss scale.
    """
    rows: list[ErrorRow] = []
    for precision, records in found.items():
        last = records[-1]
        for row in PRECISION_ERROR.of(last.results):
            rows.append({"precision": precision.value, **row, "status": last.status, "reason": last.reason})
        if not PRECISION_ERROR.of(last.results):
            rows.append({"precision": precision.value, **NO_ERRORS, "status": last.status, "reason": last.reason})
    return rows


def learning(found: dict[Precision, list[RunRecord]]) -> list[LearningRow]:
    """Return a row for each precision of one cell."""
    baseline = _losses(found.get(BASELINE, []))
    rows: list[LearningRow] = []
    for precision, records in found.items():
        losses, last = _losses(records), records[-1]
        apart = [abs(a - b) for a, b in zip(losses, baseline, strict=False)] if precision is not BASELINE else []
        broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        most = max(apart, default=None) if broken is None else None
        tail = losses[-max(1, len(losses) // 10) :]
        curve = TRAINING_CURVE.of(last.results)
        rows.append(
            {
                "precision": precision.value,
                "steps": len(losses) or None,
                "first_loss": losses[0] if losses else None,
                "last_loss": sum(tail) / len(tail) if tail and broken is None else None,
                "largest_deviation": most,
                "at_step": None if most is None else apart.index(most),
                "loss_scale": scale_history(curve),
                "skipped": sum(row["skipped"] for row in curve) if scale_history(curve) else None,
                "status": last.status,
                "reason": last.reason if broken is None else f"the loss is NaN or infinite from step {broken} on",
            }
        )
    return rows


def _losses(records: Sequence[RunRecord]) -> list[float]:
    return [row["loss"] for record in records[-1:] for row in TRAINING_CURVE.of(record.results)]


def scale_history(curve: Sequence[TrainingCurveRow]) -> str | None:
    """Format the history of the loss scale, as in `65,536; 32,768 from step 3`; None without a loss scale."""
    return "; ".join(_scales(curve)) or None


def _scales(curve: Sequence[TrainingCurveRow]) -> Iterator[str]:
    before = None
    for row in curve:
        if (scale := row["loss_scale"]) is not None and scale != before:
            yield f"{scale:,.0f}" if before is None else f"{scale:,.0f} from step {row['step']}"
        before = row["loss_scale"]


PRECISION_ERROR = Table("precision_error", PrecisionErrorRow, "relative errors of a step in low precision")
TRAINING_CURVE = Table("training_curve", TrainingCurveRow, "loss of each training step")
