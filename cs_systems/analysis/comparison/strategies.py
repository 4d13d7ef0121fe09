"""Cost of parallel strategies, from records: each cell on several ranks compared with the same cell on one rank.

Cells belong to one group if they differ only in strategy, its options, and number of ranks. A group's baseline is
`single` on one rank with the batch of a rank. Each row is about one repeat of a cell timed without a profiler. The row
is joined with profiled records of the same cell and repeat, and with the baseline of that repeat.

Each row identifies its cell by `CellColumns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

from cs_systems.analysis.attribution.gathers import GATHERS
from cs_systems.analysis.attribution.overlap import RANK_OVERLAP, RankOverlapRow, Reconciled, reconcile
from cs_systems.config import STRATEGY_OPTIONS, Phase, RunConfig
from cs_systems.core import statistics
from cs_systems.core.fields import Subject
from cs_systems.core.printable import spans
from cs_systems.core.tables import Column, Row, first_row, table
from cs_systems.formulas.memory.tables import RANK_MEMORY
from cs_systems.formulas.rank_layout import averages_after_backward, data_ranks
from cs_systems.record import RunRecord

_CELL = "strategy ranks repeat"
MOST_EFFICIENT = 1.05  # an efficiency above this is more than noise: N ranks cannot do over N times the work
DISTURBED = (
    f"an efficiency over {MOST_EFFICIENT:.0%} is not shown, nor the time beyond that baseline: other programs probably "
    "disturbed the baseline; measure again with --fresh"
)
STAGES = ("built", "forward", "backward", "optimizer")


class CellColumns(TypedDict):
    """Columns that identify the cell of a row in its group."""

    strategy: str
    ranks: int
    repeat: int | None  # None if nothing was repeated


class StepRow(CellColumns):
    """Step of a cell, all ranks together."""

    step_s: float | None
    p10_s: Annotated[float | None, Column(drop=2)]
    p90_s: Annotated[float | None, Column(drop=3)]
    # None if gradients are also sent at other times, or by code outside of this package
    communication_s: Annotated[
        float | None,
        Column(
            "comm.",
            "comm.: communication by the clock, after backward until gradients are averaged, waiting included",
        ),
    ]
    of_step: Annotated[float | None, Column("of step")]
    exposed: Annotated[
        float | None,
        Column(
            "exposed",
            "exposed, hidden: communication alone and beside computation, as shares of a traced step",
            drop=6,
        ),
    ]
    hidden: Annotated[float | None, Column(drop=5)]
    tokens_per_s: Annotated[float | None, Column(drop=1)]  # sum over all ranks
    # Tokens/s over the tokens/s of as many baselines; None without a baseline, or with a disturbed one.
    efficiency: Annotated[
        float | None, Column(note="efficiency: tokens/s over that of the same number of independent ranks", drop=4)
    ]
    note: str | None


class CommunicationRow(CellColumns):
    """Communication time of a cell on ranks, by two methods.

    The first is the step's time minus the baseline's; the other is from the straggler's trace.
    """

    by_difference_s: Annotated[float | None, Column("longer", "longer: step time minus that of one rank alone")]
    of_step: float | None  # by_difference_s over the step
    traced_step_s: Annotated[
        float | None,
        Column("traced step", "traced step: of the straggler, under the profiler, which makes it longer", drop=2),
    ]
    communication_s: Annotated[float | None, Column("in trace", "in trace: communication, exposed and hidden together")]
    in_trace_s: Annotated[
        float | None,
        Column("exposed", "exposed: communication without simultaneous computation, from a trace of the straggler"),
    ]  # exposed communication
    hidden_s: Annotated[
        float | None, Column(note="hidden: communication with simultaneous computation, from the same trace")
    ]
    hidden: Annotated[float | None, Column("hidden %", drop=1)]  # hidden_s over all communication
    # all collectives, mean over the recorded steps
    transfer_s: Annotated[float | None, Column(note="transfer: time of the collectives after all ranks have joined")]
    # the rank that waits longest, mean over the recorded steps
    waiting_s: Annotated[
        float | None, Column(note="waiting: time until all ranks have joined, of the rank that waits longest")
    ]


class DifferenceRow(CellColumns, Reconciled):
    """Reasons why a cell's step is longer than the baseline's."""


class VolumeRow(CellColumns):
    """Bytes of a cell per step and per rank; memory is of the rank that holds most."""

    collectives: Annotated[int | None, Column("calls")]
    sent_bytes: Annotated[float | None, Column(note="sent: bytes that a rank sends in a step, counted by the strategy")]
    formula_sent_bytes: Annotated[
        float | None, Column("formula", "formula: bytes that a rank sends by ring algorithms")
    ]
    peak_allocated_bytes: Annotated[int | None, Column("peak")]
    predicted_peak_bytes: Annotated[int | None, Column("predicted")]


class StageRow(CellColumns):
    """Bytes of a component at the end of each stage of the first step, on the rank that holds most."""

    component: str
    built_bytes: int | None
    forward_bytes: int | None
    backward_bytes: int | None
    optimizer_bytes: int | None
    # The largest deviation from the formula, over the formula's maximum.
    off: Annotated[float | None, Column(note="off: largest deviation from the formula")]


def group_of(config: RunConfig) -> RunConfig:
    """Return the config that all cells of a group share."""
    alone = replace(config, strategy="single", world_size=1, **STRATEGY_OPTIONS)
    return replace(alone, profiler="none", warmup=0, steps=1, rounds=1)


def groups(records: Sequence[RunRecord]) -> dict[RunConfig, list[RunRecord]]:
    """Return the records by group, in their order, with each repeat of a cell.

    Of several attempts at a repeat, only the last is kept.
    """
    found: dict[RunConfig, dict[tuple[RunConfig, int], RunRecord]] = {}
    for record in records:
        config = record.run_config
        found.setdefault(group_of(config), {})[config, record.repeat] = record
    return {group: list(of.values()) for group, of in found.items()}


def name(config: RunConfig) -> str:
    """Return the name of a cell in its group, without the number of ranks: `ddp_bucketed 25 MB`."""
    size = "" if config.bucket_size_mb is None else f" {config.bucket_size_mb:g} MB"
    degree = "" if config.tp_degree is None else f" of {config.tp_degree}"
    return ":".join([config.strategy, *config.strategy_args]) + degree + size


def clean(group: Iterable[RunRecord]) -> list[RunRecord]:
    return [record for record in group if not record.is_profiled]


def seen_by(profiler: str, record: RunRecord, group: Iterable[RunRecord]) -> RunRecord | None:
    """Return the record of the same cell and repeat under that profiler, if it succeeded."""
    like = _cell(record)
    profiled = (r for r in group if r.run_config.profiler == profiler and r.status == "ok")
    return next((r for r in profiled if _cell(r) == like), None)


def _cell(record: RunRecord) -> tuple[Any, ...]:
    config = record.run_config
    return name(config), config.world_size, record.repeat


def _identity(record: RunRecord, group: Iterable[RunRecord]) -> CellColumns:
    several = len({r.repeat for r in group}) > 1
    strategy, ranks, repeat = _cell(record)
    return {"strategy": strategy, "ranks": ranks, "repeat": repeat if several else None}


def baseline(group: Iterable[RunRecord], repeat: int = 0) -> RunRecord | None:
    """Return the record of `single` on one rank in that repeat, timed without a profiler."""
    alone = (r for r in clean(group) if r.run_config.world_size == 1 and not r.run_config.is_distributed)
    return next((r for r in alone if r.repeat == repeat), None)


@table("steps", f"{_CELL} step_s p10_s p90_s communication_s of_step exposed hidden tokens_per_s efficiency note")
def steps(group: Sequence[RunRecord]) -> list[StepRow]:
    """Return the step of each cell."""
    rows: list[StepRow] = []
    for record in clean(group):
        step_s, clocked_s = _step_s(record), _after_backward_s(record)
        times = record.measurement.durations_s("step") if record.measurement else []
        tokens = _tokens(record)
        seen = straggler(seen_by("overlap", record, group)) if record.run_config.world_size > 1 else None
        rows.append(
            {
                **_identity(record, group),
                "step_s": step_s,
                "p10_s": statistics.quantile(times, 0.1) if times else None,
                "p90_s": statistics.quantile(times, 0.9) if times else None,
                "communication_s": clocked_s,
                "of_step": clocked_s / step_s if clocked_s is not None and step_s else None,
                "exposed": seen["exposed_s"] / seen["step_s"] if seen else None,
                "hidden": seen["hidden_s"] / seen["step_s"] if seen else None,
                "tokens_per_s": tokens / step_s if tokens and step_s else None,
                "efficiency": None if is_disturbed(record, group) else _efficiency(record, group),
                "note": record.reason if record.status != "ok" else ", ".join(w.code for w in record.warnings),
            }
        )
    return rows


def _tokens(record: RunRecord) -> int | None:
    """Return the tokens in a step of all ranks; for a foreign model, as the model reported them."""
    config = record.run_config
    own = config.batch_size * config.tokens_per_sequence
    tokens = first_row(record.results, "ran").get("tokens") if config.subject is Subject.OWN else own
    return None if tokens is None else int(tokens) * data_ranks(record.config)


def _efficiency(record: RunRecord, group: Sequence[RunRecord]) -> float | None:
    step_s, alone_s = _step_s(record), _step_s(baseline(group, record.repeat))
    share = data_ranks(record.config) / record.run_config.world_size
    return share * alone_s / step_s if alone_s and step_s else None


def is_disturbed(record: RunRecord, group: Sequence[RunRecord]) -> bool:
    """Return whether a cell is so efficient that its baseline must have been disturbed."""
    return (_efficiency(record, group) or 0.0) > MOST_EFFICIENT


def disturbance(group: Sequence[RunRecord]) -> list[str]:
    """Return the note on values that are left out because the baseline was disturbed."""
    return [DISTURBED] if any(is_disturbed(record, group) for record in clean(group)) else []


def _after_backward_s(record: RunRecord) -> float | None:
    """Return the time after backward in which gradients are averaged; None if they are also sent at other times."""
    if _step_s(record) is None or not averages_after_backward(record.run_config.strategy):
        return None
    assert record.measurement is not None
    is_phase = Phase.SYNCHRONIZE in record.measurement.phase_names()
    return record.measurement.median_s(Phase.SYNCHRONIZE) if is_phase else None


def _step_s(record: RunRecord | None) -> float | None:
    """Return the median duration of the timed steps; None without valid times."""
    if record is None or record.measurement is None or record.status != "ok" or not record.is_timing:
        return None
    return record.measurement.median_s()


@table(
    "communication per step",
    f"{_CELL} by_difference_s of_step traced_step_s communication_s in_trace_s hidden_s hidden",
)
def communication(group: Sequence[RunRecord]) -> list[CommunicationRow]:
    """Return the communication time of each cell on ranks."""
    rows: list[CommunicationRow] = []
    for record in on_ranks(group):
        step_s, longer_s = _step_s(record), _longer_s(record, group)
        seen: Row = straggler(seen_by("overlap", record, group)) or {}
        rows.append(
            {
                **_identity(record, group),
                "by_difference_s": longer_s,
                "of_step": longer_s / step_s if longer_s is not None and step_s else None,
                "traced_step_s": seen.get("step_s"),
                "communication_s": seen.get("communication_s"),
                "in_trace_s": seen.get("exposed_s"),
                "hidden_s": seen.get("hidden_s"),
                "hidden": seen["hidden_s"] / seen["communication_s"] if seen.get("communication_s") else None,
                "transfer_s": seen.get("transfer_s"),
                "waiting_s": seen.get("waiting_s"),
            }
        )
    return rows


def _longer_s(record: RunRecord, group: Sequence[RunRecord]) -> float | None:
    """Return by how much a step is longer than the baseline's; None if the baseline was disturbed."""
    step_s, alone_s = _step_s(record), _step_s(baseline(group, record.repeat))
    return step_s - alone_s if step_s and alone_s and not is_disturbed(record, group) else None


skew = replace(
    communication,
    name="skew",
    caption="transfer and waiting per step",
    shown=f"{_CELL} transfer_s waiting_s",
    notes=("times are sums over all collectives, some of which run at the same time; means of the recorded steps",),
)


class GatheredRow(CellColumns):
    """Gathers of parameters in one phase of a cell's step."""

    phase: str | None
    gathers: int
    in_time: Annotated[int, Column("in time")]
    late: str
    late_s: Annotated[
        float, Column("waited", "waited: time that no kernel ran just before a late gather ended; the record has each")
    ]


@table("gathers of parameters in one step of rank 0", f"{_CELL} phase gathers in_time late late_s")
def gathered(group: Sequence[RunRecord]) -> list[GatheredRow]:
    """Return how many gathers of each cell came in time for the computation that needs them, and which came late."""
    rows: list[GatheredRow] = []
    for record in on_ranks(group):
        seen = seen_by("overlap", record, group)
        found = GATHERS.of(seen.results) if seen else []
        for phase in dict.fromkeys(row["phase"] for row in found):
            own = [row for row in found if row["phase"] == phase]
            late = [row for row in own if not row["in_time"]]
            rows.append(
                {
                    **_identity(record, group),
                    "phase": phase,
                    "gathers": len(own),
                    "in_time": len(own) - len(late),
                    "late": spans([row["layer"] or "others" for row in late]),
                    "late_s": sum(row["late_s"] for row in late),
                }
            )
    return rows


def straggler(record: RunRecord | None) -> RankOverlapRow | None:
    """Return the row of the rank with the longest step, with the longest waiting time of any rank.

    None without a trace.
    """
    rows = RANK_OVERLAP.of(record.results) if record else []
    if not rows:
        return None
    waits = [row["waiting_s"] for row in rows if row["waiting_s"] is not None]
    return {**max(rows, key=lambda row: float(row["step_s"])), "waiting_s": max(waits, default=None)}


@table(
    "causes of the longer step, compared with one rank",
    f"{_CELL} difference_s traced_difference_s exposed_s slower_compute_s waits_longer_s",
)
def differences(group: Sequence[RunRecord]) -> list[DifferenceRow]:
    """Return the reasons why a step on ranks is longer than the baseline's, of cells with traces of both.

    A cell with a disturbed baseline has none.
    """
    rows: list[DifferenceRow] = []
    for record in on_ranks(group):
        alone = baseline(group, record.repeat)
        step_s, alone_s = _step_s(record), _step_s(alone)
        seen, alone_seen = (straggler(r and seen_by("overlap", r, group)) for r in (record, alone))
        if step_s and alone_s and seen and alone_seen and not is_disturbed(record, group):
            rows.append({**_identity(record, group), **reconcile(seen, alone_seen, step_s, alone_s)})
    return rows


@table(
    "bytes sent and memory, per rank",
    f"{_CELL} collectives sent_bytes formula_sent_bytes peak_allocated_bytes predicted_peak_bytes",
)
def volumes(group: Sequence[RunRecord]) -> list[VolumeRow]:
    """Return the bytes sent and held by each cell."""
    rows: list[VolumeRow] = []
    for record in clean(group):
        sent, memory = first_row(record.results, "sent"), first_row(record.results, "memory")
        peaks = [_peak_bytes(r) for r in (record, seen_by("rank_memory", record, group))]
        rows.append(
            {
                **_identity(record, group),
                "collectives": sent.get("collectives"),
                "sent_bytes": sent.get("sent_bytes"),
                "formula_sent_bytes": sent.get("formula_sent_bytes"),
                "peak_allocated_bytes": next((peak for peak in peaks if peak is not None), None),
                "predicted_peak_bytes": memory.get("predicted_peak_bytes"),
            }
        )
    return rows


def _peak_bytes(record: RunRecord | None) -> int | None:
    return record.measurement.peak_allocated_bytes if record and record.measurement else None


@table(
    "memory of a rank after each stage of its first step",
    f"{_CELL} component built_bytes forward_bytes backward_bytes optimizer_bytes off",
    notes=("of the rank with the most bytes",),
)
def stages(group: Sequence[RunRecord]) -> list[StageRow]:
    """Return each component's bytes by stage, of each cell."""
    rows: list[StageRow] = []
    for record in group:
        found = [row for row in RANK_MEMORY.of(record.results) if row["step"] <= 1]
        for component in dict.fromkeys(row["component"] for row in found):
            measured, formula = (
                [_most(found, component, stage, key) for stage in STAGES] for key in ("bytes", "expected_bytes")
            )
            if any(size is not None for size in measured):
                built, forward, backward, optimizer = measured  # in the order of STAGES
                rows.append(
                    {
                        **_identity(record, group),
                        "component": component.replace("_", " "),
                        "built_bytes": built,
                        "forward_bytes": forward,
                        "backward_bytes": backward,
                        "optimizer_bytes": optimizer,
                        "off": _off(measured, formula),
                    }
                )
    return rows


def _most(rows: Iterable[Row], component: str, stage: str, key: str) -> int | None:
    of_ranks = [row[key] for row in rows if (row["component"], row["stage"]) == (component, stage)]
    return max((size for size in of_ranks if size is not None), default=None)


def _off(measured: Sequence[int | None], formula: Sequence[int | None]) -> float | None:
    pairs = [(m, f) for m, f in zip(measured, formula, strict=True) if m is not None and f is not None]
    most = max((f for _, f in pairs), default=0)
    return max(abs(m - f) for m, f in pairs) / most if most else None


def on_ranks(group: Sequence[RunRecord]) -> list[RunRecord]:
    return [record for record in clean(group) if record.run_config.world_size > 1]
