"""Default columns of the tables of cells, in their order, with the headings. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from cs_systems.config import LEAVES
from cs_systems.core.fields import Subject
from cs_systems.core.tables import heading
from cs_systems.record import measured_by
from cs_systems.report.frame_cells import FIELD_COLUMNS, LIKE, SIZE


@dataclass(frozen=True)
class Layout:
    """Default columns of a subject's table; `identity(subject)` are the columns that distinguish its cells.

    first: columns that come first. measured: columns after the phases' times. leaves: columns dropped first if the
    terminal is too narrow; the spread is the last of them, and caveats stay. has_times: True if a row shows the times
    of the step and its phases.
    """

    measured: tuple[str, ...]
    leaves: tuple[str, ...]
    first: tuple[str, ...] = ()
    has_times: bool = True


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LAYOUTS = {
    Subject.STEP: Layout(
        measured=_names(
            "spread tokens_per_s model_flops_per_s mfu step_j tokens_per_j mean_w peak_allocated_bytes note"
        ),
        leaves=_names(
            "mean_w step_j loss.median_s model_flops_per_s optimizer.median_s tokens_per_j tokens_per_s "
            "peak_allocated_bytes mfu spread"
        ),
    ),
    Subject.ATTENTION: Layout(
        first=("attention", "mode"),
        measured=_names(
            "range_s model_flops_per_s hardware_flops_per_s mfu before_backward_bytes peak_allocated_bytes note"
        ),
        leaves=_names(
            "forward.median_s backward.median_s hardware_flops_per_s mfu before_backward_bytes "
            "peak_allocated_bytes model_flops_per_s range_s"
        ),
    ),
    Subject.COLLECTIVE: Layout(
        first=("collective", "dtype"),
        measured=_names("call_s algbw_bytes_per_s busbw_bytes_per_s link_share skew.median_s note"),
        leaves=_names("calls dtype skew.median_s algbw_bytes_per_s"),
        has_times=False,  # a step is a synchronisation and several calls
    ),
}
OTHER = Layout(
    measured=_names(
        "range_s tokens_per_s samples_per_s model_flops_per_s mfu step_j tokens_per_j mean_w peak_allocated_bytes note"
    ),
    leaves=_names(
        "mean_w step_j model_flops_per_s samples_per_s tokens_per_j tokens_per_s mfu peak_allocated_bytes range_s"
    ),
)
# conditions of the measurement: fields of every subject, and other fields of how a cell is measured
_CONDITIONS = tuple(
    name
    for name, each in FIELD_COLUMNS.items()
    if each.field.is_measurement and each.field.identity and Subject.ATTENTION in each.subjects and name != "device"
)
# measurement fields that a command takes several values of
COMPARED = tuple(n for n, each in FIELD_COLUMNS.items() if each.field.takes == "many" and not each.field.identity)
ENDING = (*_CONDITIONS, *_names("device_name torch code_version seed repeat"))
ESSENTIAL = _names("forward.median_s backward.median_s")  # phases that a narrow terminal keeps

MEMORY_COLUMNS = _names("peak_allocated_bytes peak_reserved_bytes predicted_peak_bytes note")
# Caveats that also concern records that are not timings.
MEMORY_CAVEATS = frozenset({"nan-loss", "no-tables", "shared-gpu"})


def is_timed(workload: str, profiler: str) -> bool:
    """Return whether a step's time is meaningful: not under a profiler of memory, values or counters."""
    return Subject.of(workload).is_timed and measured_by(profiler) == "time"


# columns that are left out if they only repeat the other one
ECHOES = {LEAVES[path].name: LEAVES[other].name for path, other in LIKE.items()} | {"executed_d_head": "d_head"}
# Constants that a caption omits.
SILENT_COLUMNS = frozenset(_names("device_name code_version seed repeat"))

TITLES = {
    **{name: each.field.heading for name, each in FIELD_COLUMNS.items() if each.field.heading},
    "device_name": "device",
    "code_version": "code",
    "executed_d_head": "padded d_head",
    "ran_optimizer": "optimizer",
    "median_s": "median",
    "range_s": "p10 … p90",
    "ci_low_s": "CI low",
    "ci_high_s": "CI high",
    "submit_median_s": "submit",
    "lag_median_s": "lag",
    "wall_minus_phases_s": "outside phases",
    "model_flops_per_s": "model",
    "hardware_flops_per_s": "executed",
    "ceiling_flops_per_s": "ceiling",
    "step_j": "energy",
    "above_idle_j": "above idle",
    "mean_w": "power",
    "mfu": "MFU",
    "hfu": "HFU",
    "call_s": "per call",
    "algbw_bytes_per_s": "algbw",
    "busbw_bytes_per_s": "busbw",
    "link_share": "of the link",
    "skew.median_s": "skew",
    "before_backward_bytes": "before bwd",
    "peak_allocated_bytes": "peak",
    "peak_reserved_bytes": "reserved",
    "predicted_peak_bytes": "predicted",
}
# legends of columns with names that need an explanation; a table includes those of its columns
LEGENDS = {
    "skew.median_s": "skew: longest time that a rank waited for the others before the calls",
    "spread": "spread: (p90 − p10) / median",
    "ci_low_s": "CI: 95% confidence interval of the median; it is computed from the medians of the rounds, or from the "
    "samples, assumed independent, if there are fewer than 3 rounds",
    "submit_median_s": "submit: time the CPU took to submit the work",
    "lag_median_s": "lag: delay of the device behind the CPU at the end of the phase; near 0, the device waited",
    "wall_minus_phases_s": "outside phases: time of the step minus the time of its phases",
    "model_flops_per_s": "model FLOP/s: FLOPs by formula / time; causal attention counts half",
    "hardware_flops_per_s": "executed FLOP/s: computed FLOPs / time, with padding, masked tiles and recomputation",
    "step_j": "energy: of a step, from the counter of the whole board (CPU: its packages) over all timed steps",
    "above_idle_j": "above idle: energy of a step minus the energy of an idle device in the same time",
    "mean_w": "power: mean over all timed steps",
    "mfu": "MFU: model FLOP/s as a share of the device's peak at that precision",
    "call_s": "per call: median time of one call on the slowest rank, after all ranks are ready",
    "algbw_bytes_per_s": "algbw: message size / time; busbw: algbw × 2(n−1)/n for all_reduce, × 1 for broadcast, "
    "× (n−1)/n for the others",
    "link_share": "of the link: busbw as a share of the peak bandwidth of a GPU's links in one direction",
    "before_backward_bytes": "before bwd: memory of a call before backward: inputs, output, its gradient, and what "
    "forward keeps",
    "hfu": "HFU: executed FLOP/s as a share of the device's peak at that precision",
}

# columns that only a GPU fills, with the command that measures them
OF_THE_ALLOCATOR = {"peak_allocated_": "memory", "peak_reserved_": "memory", "before_backward_": "attention"}

# Meanings of further columns, for the schema of a JSON document.
MEANINGS = {
    "phase": "phase of the step that the row is about",
    "n": "number of timed steps",
    "median_s": "median time of a step",
    "mean_s": "mean time of a step",
    "status": "ok, oom, unavailable, timeout, killed or error",
    "reason": "why there is no number",
    "warnings": "caveats of the cell",
    "note": "caveats of the cell, or why it has no number",
    "tokens_per_s": "tokens per second",
    "samples_per_s": "samples per second",
    "peak_allocated_bytes": "peak of the allocated memory",
    "peak_reserved_bytes": "peak of the memory reserved by the allocator",
    "predicted_peak_bytes": "predicted peak of the allocated memory",
    "model_flops": "FLOPs of the model in a step by formula",
    "hardware_flops": "FLOPs in a step as executed, by formula",
}

# Replacements of a legend for workloads from outside the package.
COUNTED = {
    "model_flops_per_s": "model FLOP/s: FLOPs as counted or declared / time; causal attention counts half",
    "hardware_flops_per_s": "executed FLOP/s: all FLOPs, with recomputation, / time",
}
OF_RANKS = {  # additions to a legend if a step has several ranks
    "tokens_per_s": "tokens/s: sum over all ranks",
    "samples_per_s": "samples/s: sum over all ranks",
    "model_flops_per_s": "; for one rank",
    "hardware_flops_per_s": "; for one rank",
}


def layout(workload: str) -> Layout:
    return LAYOUTS.get(Subject.of(workload), OTHER)


def identity(workload: str) -> tuple[str, ...]:
    """Return the columns that distinguish the cells of a workload, in order; constant ones move to the caption."""
    subject, first = Subject.of(workload), layout(workload).first
    subject = Subject.OWN if subject is Subject.LOOP else subject  # both report the fields that ran
    found = [
        name
        for name, each in FIELD_COLUMNS.items()
        if subject in each.subjects and each.field.identity and (name == SIZE or not each.field.short)
    ]
    named = [name for name in found if name not in (*first, *ENDING, "workload", "device")]
    if "d_head" in named:
        named.insert(named.index("d_head") + 1, "executed_d_head")
    return (*first, *named, *ENDING)


def is_silent(column: str, value: object) -> bool:
    """Return whether a caption omits a constant because it is an ordinary default."""
    each = FIELD_COLUMNS.get(column)
    if each is None or each.field.spoken:
        return False
    return bool(value == each.text(each.default) or value == each.field.empty)


def title(column: str) -> str:
    """Return the heading of `column`, without its unit."""
    return TITLES.get(column) or heading(column)
