"""Figure of one step's streams: computation and communication over time, two lines per cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cs_systems.core import units
from cs_systems.core.printable import plain
from cs_systems.record import RunRecord
from cs_systems.report import palette
from cs_systems.report.figures.drawing import WIDTH, filled, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = ("forward", "loss", "backward", "optimizer")
MOST = 24  # limit of cells in one figure


def streams(records: Sequence[RunRecord]) -> Figure:
    """Draw the streams of rank 0 in one step of each cell, with the step's duration, the mean, and the overlap."""
    from matplotlib.figure import Figure

    found = [record for record in records if record.results.get("streams")]
    cells, hidden = found[:MOST], len(found[MOST:])
    last_s = max(row["end_s"] for record in cells for row in record.results["streams"])
    unit = units.best_unit(units.SCALES["_s"], [last_s])
    drawn = Figure(figsize=(WIDTH, 1.2 + 0.72 * len(cells)), layout="constrained")
    axes = drawn.add_subplot()
    named: set[str] = set()
    for number, record in enumerate(cells):
        for stream, phase, height in [*((("compute", p, 0.0)) for p in (*PHASES, None)), ("communication", None, 0.36)]:
            spans = [
                (row["start_s"] / unit.factor, (row["end_s"] - row["start_s"]) / unit.factor)
                for row in record.results["streams"]
                if row["stream"] == stream and (row["phase"] if row["phase"] in PHASES else None) == phase
            ]
            if spans:
                label = phase or ("communication" if stream == "communication" else "other computation")
                look = palette.paint("communication" if stream == "communication" else phase or "outside")
                new = label if label not in named else None
                axes.broken_barh(spans, (number + height - 0.36, 0.34), label=new, **filled(look))
                named.add(label)
        axes.text(last_s / unit.factor * 1.01, number, _labels(record), va="center", fontsize=8)
    more = f"; {hidden} more cells are in the records" if hidden else ""
    axes.set_yticks(range(len(cells)), [_name(record) for record in cells])
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlim(0, last_s / unit.factor * 1.26)
    meaning = f"one profiled step of rank 0, its median one; above: computation, below: communication{more}"
    axes.set_xlabel(f"{unit.label} from the start of the step ({meaning})", loc="right")
    axes.grid(axis="x")
    return with_legend(drawn, axes)


def _name(record: RunRecord) -> str:
    config = record.run_config
    size = "" if config.bucket_size_mb is None else f" {config.bucket_size_mb:g} MB"
    degree = "" if config.tp_degree is None else f" of {config.tp_degree}"
    strategy = ":\n".join(map(plain, [config.strategy, *config.strategy_args]))
    return f"{strategy}{degree}{size}\n{config.world_size} rank{'s' if config.world_size > 1 else ''}"


def _labels(record: RunRecord) -> str:
    """Return labels with the durations of the drawn step and of the median profiled step, and its communication."""
    own = next((row for row in record.results.get("overlap", ()) if row["rank"] == 0), None)
    if own is None:
        return ""
    lines = [f"step {units.human(own['step_s'], 's')}"]
    measured = record.measurement
    if measured and len(measured.timed) > 1 and (step_s := measured.median_s()) is not None:
        lines.append(f"median {units.human(step_s, 's')}")
    if own["communication_s"]:
        lines += [f"exposed {units.human(own['exposed_s'], 's')}", f"hidden {units.human(own['hidden_s'], 's')}"]
    return "\n".join(lines)
