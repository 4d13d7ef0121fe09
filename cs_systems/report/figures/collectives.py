"""Figure of collectives: time and bus bandwidth of a call by its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cs_systems.core import units
from cs_systems.core.collectives import readable_bytes
from cs_systems.record import RunRecord
from cs_systems.report import collectives
from cs_systems.report.figures.drawing import COLORS, INK, MARKERS, MOST_CURVES, WIDTH, log_scale, with_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_TICKS = 7


def calls(records: Sequence[RunRecord]) -> Figure:
    """Draw a curve per kind of call: left the time and (dotted) α + n/β, right the busbw under the link's ceiling."""
    from matplotlib.figure import Figure

    found = collectives.lines(records)
    drawn = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    times, rates = drawn.subplots(1, 2)
    names = _names(list(found))
    seconds = [collectives.call_s(r) or 0.0 for of in found.values() for r in of]
    unit = units.best_unit(units.SCALES["_s"], seconds)
    rate_unit = units.best_unit(units.SCALES["_bytes_per_s"], [b for of in found.values() for b in _busbw(of) if b])
    for (line, of), color, marker in zip(found.items(), COLORS, MARKERS, strict=False):
        sizes = [collectives.size_bytes(r) for r in of]
        look = {"color": color, "marker": marker, "markersize": 4, "label": names[line]}
        times.plot(sizes, [(collectives.call_s(r) or 0.0) / unit.factor for r in of], **look)
        if through := collectives.fitted(of):
            times.plot(sizes, [through.time_s(n) / unit.factor for n in sizes], color=color, linestyle=":", linewidth=1)
        if any(_busbw(of)):
            rates.plot(sizes, [(b or 0.0) / rate_unit.factor for b in _busbw(of)], **look)
    for axes, label in ((times, f"{unit.label} per call (dotted: fit α + n/β)"), (rates, f"busbw, {rate_unit.label}")):
        _log_log(axes, sorted({collectives.size_bytes(r) for of in found.values() for r in of}))
        axes.set_ylabel(label)
    _ceilings(rates, records, rate_unit)
    if hidden := len(found) - MOST_CURVES:
        times.set_xlabel(f"size ({hidden} more curves are in the table)" if hidden > 0 else "size")
    return with_legend(drawn, times)


def _busbw(records: Sequence[RunRecord]) -> list[float | None]:
    steps = map(collectives.step, records)
    return [step["busbw_bytes_per_s"] if step else None for step in steps]


def _names(lines: Sequence[collectives.Line]) -> dict[collectives.Line, str]:
    """Name each curve by its differences from the others: `all_reduce · 2 ranks`."""
    several = [len({line[i] for line in lines}) > 1 for i in range(3)]
    several[0] = several[0] or not any(several)
    names = {}
    for line in lines:
        words = (line.collective, line.dtype, "1 rank" if line.world_size == 1 else f"{line.world_size} ranks")
        names[line] = " · ".join(word for word, shown in zip(words, several, strict=True) if shown)
    return names


def _ceilings(axes: Axes, records: Sequence[RunRecord], unit: units.Unit) -> None:
    cells = map(collectives.cell, records)
    known = dict.fromkeys((c["link_bytes_per_s"], c["link_source"]) for c in cells if c and c["link_bytes_per_s"])
    for peak, source in known:
        axes.axhline(peak / unit.factor, color=INK, linewidth=1.2, linestyle="--")
        label = "\n".join([f"{units.significant(peak / unit.factor)} {unit.label}", *str(source).split(": ")])
        at = axes.get_yaxis_transform()
        axes.annotate(label, (0, peak / unit.factor), (3, -4), at, "offset points", va="top", fontsize=8)


def _log_log(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[:: -(-len(sizes) // SIZE_TICKS)])
    axes.xaxis.set_major_formatter(lambda value, _: readable_bytes(int(value)))
    axes.tick_params(axis="x", labelsize=8)
    axes.minorticks_off()
    log_scale(axes.yaxis)
    axes.set_xlabel("size")
    axes.grid()
