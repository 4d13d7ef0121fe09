"""`--fits` and `--best-checkpoint` for a user's own model, from predictions of its step on fake tensors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, TypedDict

from cs_systems.cli._document import add
from cs_systems.cli._memory_text import say
from cs_systems.config import ConfigError, RunConfig, describe
from cs_systems.core.fields import Subject
from cs_systems.core.tables import Column, Table
from cs_systems.core.units import human
from cs_systems.formulas.memory.fit import CONTEXT_BYTES, MOST, Change, largest, with_context
from cs_systems.formulas.memory.tables import ForecastRow
from cs_systems.record import RunRecord
from cs_systems.report.tables import document

Forecast = Callable[[RunConfig], ForecastRow]
Measure = Callable[[RunConfig], RunRecord]
# measured in profiles/foreign_memory and profiles/memory_prediction
ACCURACY = (
    "accuracy: within 3.2% for 17 held-out families, predicted before one H100 measured them; "
    "within 3.7% for 20 others, with rules mended for 15 of them; "
    "worse where cuDNN takes another workspace for convolutions or recurrent layers, which only a GPU can tell; "
    "fragmentation of the allocator is not predicted"
)
ACCURACY_OF_FORMULA = "accuracy: within 5% in each of 427 cells measured on one H200; fragmentation is not predicted"
LEAST_TOP = 4  # smallest upper batch size to measure, for a straight line through the peaks
_CONTEXT_FIELDS = {"seq_len", "model.context_length"}


class FitRow(TypedDict):
    """Prediction for one of several cells, with the largest batch and context that fit; 0 if none does.

    Null if a workload of the user's own does not read such a size.
    """

    cell: str
    needed_bytes: int
    fits: bool
    largest_batch: Annotated[int | None, Column("batch", "batch, context: the largest that fits")]
    largest_context: Annotated[int | None, Column("context")]
    first: Annotated[str, Column("change first", drop=1)]


FITS = Table("fits", FitRow, "predicted memory of a step")


def accuracy_of(config: RunConfig) -> str:
    """Return the accuracy of predictions for this kind of cell, from earlier measurements."""
    if config.subject is not Subject.OWN:
        return ACCURACY_OF_FORMULA
    return ACCURACY if config.checkpoint == "none" else f"{ACCURACY}; checkpoints were not among them"


def print_fits(config: RunConfig, device_bytes: int, forecast: Forecast, measure: Measure | None) -> None:
    """Print whether a step of the user's own model fits, and the largest batch and context that fit.

    Raises ConfigError.

    measure: measures a cell on this machine's GPU if fake tensors cannot run its step; None without a GPU.
    """
    config = replace(config, device="cuda")
    first = forecast(config)
    if first["reason"] is not None and measure is not None:
        _print_extrapolated(config, device_bytes, first["reason"], measure)
        return
    needed = _needed(known(first))
    print_verdict(config, needed, device_bytes)

    def most(change: Callable[[int], RunConfig], start: int) -> int:
        return largest(lambda n: _needed(known(forecast(change(n)))), device_bytes, start)

    largest_sizes, reads = dict[str, int](), set(first["reads"])
    if "batch_size" in reads:
        largest_sizes["batch"] = most(lambda n: replace(config, batch_size=n), config.batch_size)
    if reads & _CONTEXT_FIELDS:
        largest_sizes["context"] = most(lambda n: with_context(config, n), config.tokens_per_sequence)
    found = [size(name, most) for name, most in largest_sizes.items()]
    _add_row(config, needed, device_bytes, largest_sizes)
    unread = "the factory reads neither config.batch_size nor config.tokens_per_sequence, so no size can be searched"
    say(f"  largest that fits: {', or '.join(found)}" if found else f"  {unread}")
    for line in (accuracy_of(config), *first["caveats"]):
        say(f"  {line}")


def size(name: str, largest: int) -> str:
    """Format the largest batch or context that fits; `or more` if it is MOST, where the search ends."""
    if largest >= MOST:
        return f"{name} {largest:,} or more"
    return f"{name} {largest:,}" if largest else f"no {name}"


def print_verdict(config: RunConfig, needed: float, device_bytes: int) -> None:
    """Print whether the bytes that a cell needs fit a device."""
    verdict = "with the CUDA context, " + ("fits" if needed <= device_bytes else "does not fit")
    say(f"{describe(config)}: {human(needed, 'bytes')} {verdict} {human(device_bytes, 'bytes')}")


def _add_row(config: RunConfig, needed_bytes: int, device_bytes: int, largest_sizes: Mapping[str, int]) -> None:
    """Add what is printed to the document of the command, with --format json."""
    row: FitRow = {
        "cell": describe(config),
        "needed_bytes": needed_bytes,
        "fits": needed_bytes <= device_bytes,
        "largest_batch": largest_sizes.get("batch"),
        "largest_context": largest_sizes.get("context"),
        "first": "",
    }
    add(document.table(FITS, [row]))


def _print_extrapolated(config: RunConfig, device_bytes: int, reason: str, measure: Measure) -> None:
    """Print the same as `print_fits`, from a straight line through the measured peaks of three batch sizes."""
    top = max(LEAST_TOP, config.batch_size)
    sizes = [top // 4, top // 2, top]
    peaks = [_peak(measure(replace(config, batch_size=n, warmup=0, steps=2, rounds=1)), reason) for n in sizes]
    slope, intercept = statistics.linear_regression(sizes, peaks)
    error = max(abs(intercept + slope * n - peak) / peak for n, peak in zip(sizes, peaks, strict=True))

    def needed(n: int) -> int:
        return int(intercept + slope * n) + CONTEXT_BYTES

    print_verdict(config, needed(config.batch_size), device_bytes)
    most = largest(needed, device_bytes, config.batch_size)
    _add_row(config, needed(config.batch_size), device_bytes, {"batch": most})
    say(f"  largest that fits: {size('batch', most)}")
    measured = ", ".join(f"{human(peak, 'bytes')} at batch {n}" for n, peak in zip(sizes, peaks, strict=True))
    say(f"  extrapolated from measured peaks, because {reason.partition(';')[0]}: {measured}")
    say(
        f"  accuracy: a straight line through the measured peaks is at most {error:.1%} off; "
        "further away it may be more"
    )


def _peak(record: RunRecord, reason: str) -> int:
    """Return the measured peak.

    Raises ConfigError if the measurement failed; `reason` says why nothing was predicted.
    """
    peak = record.measurement.peak_allocated_bytes if record.measurement else None
    if peak is None:
        batch = record.config["batch_size"]
        smaller = "use a smaller --batch-size, or " if batch > LEAST_TOP else "use "
        gpu = f"{smaller}a GPU with more memory"
        why, _, instead = reason.partition("; ")
        remedies = {"oom": gpu, "unavailable": instead}
        remedy = remedies.get(record.status) or "correct the cause, then run the command again"
        cause, _, _ = str(record.reason).partition("; ")
        raise ConfigError(
            f"the memory cannot be predicted, because {why}, and measuring it at batch {batch} failed "
            f"({record.status}: {cause}); {remedy}"
        )
    return peak


def known(row: ForecastRow) -> ForecastRow:
    """Return the prediction. Raises ConfigError with the reason if memory could not be predicted."""
    if row["reason"] is not None:
        raise ConfigError(f"the memory cannot be predicted: {row['reason']}")
    return row


def cheapest_plan(config: RunConfig, budget_bytes: int, forecast: Forecast) -> tuple[Change, float] | None:
    """Return the checkpoint plan that fits with the fewest recomputed FLOPs, and the share of the step's FLOPs.

    None if none fits. Raises ConfigError where memory cannot be predicted.
    """
    without = known(forecast(replace(config, checkpoint="none")))
    if fits := _change(config, "none", without, budget_bytes):
        return fits, 0.0
    flops = without["flops"] or 0
    found = []
    for plan in _plans(without["stacks"]):
        row = forecast(replace(config, checkpoint=plan))
        if row["reason"] is None and (change := _change(config, plan, row, budget_bytes)):
            found.append((change, ((row["flops"] or 0) - flops) / flops if flops else 0.0))
    return min(found, key=lambda pair: pair[1], default=None)


def _plans(stacks: dict[str, int]) -> Iterator[str]:
    """Yield checkpoint plans to try: the first eighths of one list of blocks, all blocks, and selective plans."""
    if len(stacks) == 1:
        (blocks,) = stacks.values()
        yield from dict.fromkeys(f"blocks:0-{max(0, blocks * part // 8 - 1)}" for part in range(1, 8))
    yield "every:1"
    yield "selective:matmul"


def _change(config: RunConfig, plan: str, row: ForecastRow, budget_bytes: int) -> Change | None:
    needed = row["peak_bytes"] + CONTEXT_BYTES if row["peak_bytes"] is not None else budget_bytes + 1
    planned = replace(config, checkpoint=plan)
    return Change(f"--checkpoint {plan}", needed, True, planned) if needed <= budget_bytes else None


def _needed(row: ForecastRow) -> int:
    assert row["peak_bytes"] is not None
    return row["peak_bytes"] + CONTEXT_BYTES
