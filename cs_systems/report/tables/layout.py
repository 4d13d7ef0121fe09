"""Default columns of the tables of cells, in their order. Data only."""

from __future__ import annotations

from typing import NamedTuple

from cs_systems.config import LEAVES
from cs_systems.core.fields import Subject
from cs_systems.record import measured_by
from cs_systems.report.frame_cells import FIELD_COLUMNS, LIKE, SIZE


class Layout(NamedTuple):
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
LOOP = OTHER._replace(first=("levers",))
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


def layout(workload: str) -> Layout:
    subject = Subject.of(workload)
    return LOOP if subject is Subject.LOOP else LAYOUTS.get(subject, OTHER)


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
