"""Tables of the gains and costs of a lower precision: times, errors, training and causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from textwrap import fill
from typing import Any, TypedDict

from cs_systems.analysis.comparison import precision, precision_causes
from cs_systems.analysis.comparison.precision import ErrorRow, GainRow, LearningRow
from cs_systems.cli._output import RAW
from cs_systems.config import Precision
from cs_systems.core.fields import Subject
from cs_systems.core.printable import plain
from cs_systems.core.tables import Row, Table
from cs_systems.core.tracers import TRACERS
from cs_systems.record import RunRecord
from cs_systems.report.tables.formats import paragraph, text_width
from cs_systems.report.tables.records import counted_caveats

UNKNOWN = "–"


class ShownGain(GainRow, total=False):
    """Step of a cell in one precision with its gain: a row of the printed table."""

    gain: str | None
    interval: str | None


class FailedRow(TypedDict):
    """Precision in which nothing was measured."""

    precision: str
    status: str


GAINS = Table(
    "gains",
    ShownGain,
    "time of a step",
    "precision forward_s loss_s backward_s synchronize_s optimizer_s step_s gain interval tokens_per_s mfu "
    "peak_allocated_bytes",
)
ERRORS = Table(
    "errors",
    ErrorRow,
    "relative error against a reference of the same parameters and batch",
    "precision logits_error loss_error gradient_error worst_parameter_error underflow_share nonfinite_share",
)
LEARNING = Table(
    "learning",
    LearningRow,
    "training on the same data",
    "precision steps first_loss last_loss largest_deviation loss_scale skipped",
)
FAILED = Table("failed", FailedRow, "precisions without a result")
# the table, its rows, the rows as they are printed, and notes
Section = tuple[Table[Any], Sequence[Row], Sequence[Row], list[str]]
MEDIANS = "times: medians over all rounds"
INTERVAL = "gain: fp32's step time over this precision's; interval: 95% confidence, from"
OWN_PEAK = "MFU: relative to the peak of each precision"
MIXED = "fp8: the linear layers of the blocks run in fp8, attention and lm_head in bf16"
MIXED_OWN = (
    "fp8: the linear layers whose sizes allow it run in fp8, the rest in bf16; the MFU is relative to fp8's peak all "
    "the same"
)
MIXED_PEAK = "the MFU of fp8 is relative to fp8's peak, although attention and lm_head run in bf16"
UNDERFLOW = (
    "underflow: share of gradient elements that are 0 while the reference's are not; worst parameter's: largest error "
    "of one parameter's gradient"
)
NO_KERNEL = "only traces of a GPU contain kernels; profile on a GPU"
NO_GPU = "no CUDA: "  # such a cell's usual remedy, device cpu, does not help here
SCALED = "loss scale: factor on fp16's loss; skipped: steps whose gradients overflowed"


def comparison_texts(records: Sequence[RunRecord], format: str, width: int | None) -> list[str]:
    """Return the tables of each cell for which there are records, and the sentences about profiled cells."""
    from cs_systems.report.tables.rows import render_table

    texts, color = [], width is not None
    for table, rows, shown, notes in _sections(records):
        if format not in RAW and all(row["status"] != "ok" for row in rows):
            table, shown, notes = replace(FAILED, caption=table.caption), rows, _reasons(rows)
        texts.append(render_table(table, rows if format in RAW else shown, format, notes, width, color))
    sentences = [precision_causes.sentence(row) for row in precision_causes.explained(records)]
    unexplained = [f"not explained: {why}" for why in _unprofiled(records)]
    return [
        *texts,
        *(_paragraphs(group, format, width) for group in (sentences, unexplained) if group and format != "csv"),
    ]


def _sections(records: Sequence[RunRecord]) -> list[Section]:
    sections: list[Section] = []
    for cell, found in precision.by_cell(records, precision.TIMED).items():
        rows = precision.gains(found)
        noise = " or ".join(dict.fromkeys(row["noise"] for row in rows if row["noise"]))
        notes = [MEDIANS, f"{INTERVAL} {noise}"] if noise else []
        notes += [OWN_PEAK] if any(row["mfu"] for row in rows) else []
        fp8 = [row for row in rows if row["precision"] == Precision.FP8 and row["step_s"]]
        own = cell.subject is Subject.OWN
        notes += [MIXED_OWN if own else MIXED] if fp8 else []
        notes += [MIXED_PEAK] if any(row["mfu"] for row in fp8) and not own else []
        notes += [*_reasons(rows), *map(str, counted_caveats(chain.from_iterable(found.values())))]
        table: Table[Any] = replace(GAINS, caption=f"{precision.name_of(cell)}: {GAINS.caption}")
        sections.append((table, rows, [*map(_gain, rows)], notes))
    for cell, found in precision.by_cell(records, precision.ERRORS).items():
        of_errors = precision.errors(found)
        references = ", ".join(dict.fromkeys(row["reference"] for row in of_errors if row["reference"])) or UNKNOWN
        caption = f"{precision.name_of(cell)}: relative error against {references} of the same parameters and batch"
        headings = {"logits_error": "outputs"} if cell.subject is Subject.OWN else {}
        table = replace(ERRORS, caption=caption, headings=headings)
        sections.append((table, of_errors, [*map(_error, of_errors)], [UNDERFLOW, *_reasons(of_errors)]))
    for cell, found in precision.by_cell(records, precision.CURVES).items():
        curves = precision.learning(found)
        notes = [SCALED] if any(row["loss_scale"] for row in curves) else []
        table = replace(LEARNING, caption=f"{precision.name_of(cell)}: {LEARNING.caption}")
        sections.append((table, curves, [*map(_lesson, curves)], notes + _reasons(curves)))
    return sections


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why rows failed or ran in another way than requested, one line per reason."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["status"] != "ok" or row["reason"]:
            found.setdefault(f"{row['status']}: {row['reason']}", {})[row["precision"]] = None
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]


def _gain(row: GainRow) -> ShownGain:
    gain = None if row["speedup"] is None else f"{row['speedup']:.2f}×"
    return {**row, "gain": gain, "interval": precision.interval(row)}


def _error(row: ErrorRow) -> Row:
    """Return the row with the scale of its loss, and its shares as texts, which may be as small as 2e-06%."""
    scale, lost = row["loss_scale"], row["nonfinite_share"]
    return {
        **row,
        "precision": row["precision"] if scale is None else f"{row['precision']}, loss × {scale:,.0f}",
        "underflow_share": _share(row["underflow_share"]),
        "nonfinite_share": _share(lost) if lost else None,
    }


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}" if value >= 1e-4 or not value else f"{100 * value:.1g}%"


def _lesson(row: LearningRow) -> Row:
    """Return the row with the step at which the largest deviation occurred."""
    apart = row["largest_deviation"]
    return {**row, "largest_deviation": None if apart is None else f"{apart:.2g} at step {row['at_step']}"}


def _unprofiled(records: Sequence[RunRecord]) -> list[str]:
    """Return the reasons why profiled cells have no explanation, without duplicates."""
    failed = (
        NO_KERNEL if record.reason is None or record.reason.startswith(NO_GPU) else record.reason
        for record in records
        if record.config["profiler"] in TRACERS and not record.results.get("families")
    )
    return [*dict.fromkeys(failed)]


def _paragraphs(sentences: Sequence[str], format: str, width: int | None) -> str:
    """Return the sentences as paragraphs, wrapped between words for a terminal."""
    texts = [plain(sentence) for sentence in sentences]
    if format == "terminal":
        texts = [fill(text, text_width(width), break_on_hyphens=False) for text in texts]
    return "".join(paragraph(text, format) for text in texts)
