"""Figures from records: `save(records, "figure.svg")`, `figure(records, kind)`, `svg(records, kind)` for inline use.

`kinds(records)` returns the members of KINDS that the records can fill. The same records give the same bytes:
no date, fixed ids. Drawn without pyplot, so that nothing global changes and no display is needed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError, one_of
from cs_systems.record import RunRecord
from cs_systems.report import palette
from cs_systems.report.figures.drawing import GREY, INK, plain_lines, texts_from_outside, wrap_labels
from cs_systems.report.figures.kinds import KINDS
from cs_systems.report.figures.labels import subject
from cs_systems.report.figures.paper import on_paper
from cs_systems.report.files import write_file
from cs_systems.report.frame import CLEAN, by_kind, frame, without_retried
from cs_systems.report.tables.layout import is_timed
from cs_systems.report.tables.records import conditions

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

ENDINGS = ("svg", "png", "pdf")
DPI = 150
PAINTED = {"page": palette.PAGE.light, "hatch": palette.HATCH.light, **{n: s.light for n, s in palette.SHADES.items()}}
TIMES = ("phases", "rate", "time", "warmup")  # kinds that show the time of a step
STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same everywhere
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may contain dollar signs
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # embedded TrueType; many conferences refuse the default, Type 3
    "svg.hashsalt": "cs_systems",
}


def kinds(records: Sequence[RunRecord]) -> list[str]:
    """Return the kinds of figures that have data in these records (first workload), most informative first."""
    chosen = _of_one_workload(records)
    return _fitting(chosen, frame(chosen))


def best(records: Sequence[RunRecord]) -> str | None:
    """Return the kind of figure that shows what varies in these records (first workload); None if none has data.

    Bars of phases show few cells. More cells along a length are curves, and cells that differ in their warm-up alone
    show every step.
    """
    from cs_systems.report.figures.bars import MOST_BARS

    chosen = _of_one_workload(records)
    data = frame(chosen)
    fitting = _fitting(chosen, data)
    if fitting[:1] != ["phases"]:
        return next(iter(fitting), None)
    cells = {record.run_config for record in chosen}
    if len({replace(cell, warmup=0) for cell in cells}) < len(cells) and "warmup" in fitting:
        return "warmup"
    return "time" if "time" in fitting and len(cells) > MOST_BARS else "phases"


def _fitting(chosen: Sequence[RunRecord], data: pd.DataFrame) -> list[str]:
    """Return the kinds of figures that have data in the records of one workload; data: their frame."""
    timed = any(is_timed(r.config["workload"], r.config.get("profiler", CLEAN)) for r in chosen)
    fitting = [name for name, kind in KINDS.items() if chosen and _holds(chosen, kind.table) and kind.fits(data)]
    return [name for name in fitting if timed or name not in TIMES]


def _holds(records: Sequence[RunRecord], table: str | None) -> bool:
    return table is None or any(record.results.get(table) for record in records)


def figure(records: Sequence[RunRecord], kind: str | None = None, titled: bool = True) -> Figure:
    """Draw one figure; without `kind` the most informative. Raises ConfigError if the records lack its data."""
    if kind is not None:
        one_of("figure", kind, KINDS)
    chosen = _of_one_workload(records)
    data = frame(chosen)
    fitting = _fitting(chosen, data)
    kinds = [*by_kind(without_retried(records))]
    which = f"the records of {kinds[0]}, which come first," if kinds[1:] else "these records"
    other = f", or give only the records of {' or '.join(kinds[1:])}" if kinds[1:] else ""
    if not fitting:
        remedy = f"choose records with timings, peak memory or profile tables{other}"
        raise ConfigError(f"{which} have no data for a figure; {remedy}")
    if kind is not None and kind not in fitting:
        raise ConfigError(f"{which} have no data for the figure {kind!r}; choose {' or '.join(fitting)}{other}")
    return _drawn(chosen, data, kind or fitting[0], titled)


def _drawn(chosen: Sequence[RunRecord], data: pd.DataFrame, kind: str, titled: bool) -> Figure:
    """Draw a kind of figure that has data in the records of one workload; data: their frame."""
    import matplotlib

    drawing = KINDS[kind]
    with matplotlib.rc_context(STYLE):
        drawn = drawing.draw(chosen, data)
        if titled:
            drawn.suptitle(f"{drawing.title}, {subject(data)}", x=0.01, ha="left", fontsize=11)
        return wrap_labels(drawn)


def save(records: Sequence[RunRecord], file: str | Path, kind: str | None = None) -> Figure:
    """Write a figure on white in the format of the file's suffix; return it. Raises ConfigError for one not in ENDINGS.

    A .pdf is for a paper: as wide as a column, and without a title; `caption` returns the text for it.
    """
    if check_ending(Path(file)) == "pdf":
        return write(lambda: on_paper(figure(records, kind, titled=False)), file)
    return write(lambda: figure(records, kind), file)


def caption(records: Sequence[RunRecord], kind: str | None = None) -> str:
    """Return the caption of a figure in a paper: its content, the device, the number of steps, and their spread."""
    chosen = _of_one_workload(records)
    data = frame(chosen)
    return f"{KINDS[kind or _fitting(chosen, data)[0]].title}: {conditions(data)}"


def check_ending(path: Path) -> str:
    """Return the suffix of a figure's file without the dot. Raises ConfigError for one not in ENDINGS."""
    ending = path.suffix.lstrip(".")
    if ending not in ENDINGS:
        raise ConfigError(f"cannot write a figure to {str(path)!r}; its name must end in .svg, .png or .pdf")
    return ending


def write(draw: Callable[[], Figure], file: str | Path) -> Figure:
    """Write the figure that `draw` returns, in STYLE, on white in the format of the file's suffix; return it."""
    import matplotlib

    path = Path(file)
    ending = check_ending(path)
    with matplotlib.rc_context(STYLE):
        drawn = wrap_labels(draw())
        write_file(path, _bytes(drawn, ending, "white"))
        return drawn


def svg(records: Sequence[RunRecord], kind: str, prefix: str = "") -> str:
    """Return a figure as one <svg> element for a page: transparent, without a title, in the page's colours.

    Its ids begin with `prefix`, so that several figures can stand in one page.
    """
    return drawn_svg(lambda: figure(records, kind, titled=False), kind, prefix)


def svgs(records: Sequence[RunRecord], prefix: str = "") -> dict[str, str]:
    """Return the figures of all `kinds(records)`, each as from `svg`."""
    chosen = _of_one_workload(records)
    data = frame(chosen)
    return {
        kind: drawn_svg(partial(_drawn, chosen, data, kind, titled=False), kind, prefix)
        for kind in _fitting(chosen, data)
    }


def drawn_svg(draw: Callable[[], Figure], kind: str, prefix: str = "") -> str:
    """Return the figure that `draw` returns as an <svg> element, in STYLE."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        text = _bytes(wrap_labels(draw()), "svg", "none").decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}{kind}-", text)
    for name, color in PAINTED.items():
        text = text.replace(color, f"var(--{name})")
    text = text.replace(INK, "currentColor")
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="figure: {kind}"', text, count=1)


def _bytes(drawn: Figure, ending: str, background: str) -> bytes:
    import matplotlib
    from matplotlib.text import Text

    for text in drawn.findobj(Text):
        text.set_text(plain_lines(text.get_text()))
    undated: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE), texts_from_outside():
        drawn.savefig(
            out, format=ending, dpi=DPI, facecolor=background, metadata=undated.get(ending, {"CreationDate": None})
        )
    return out.getvalue()


def _of_one_workload(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records of one workload, because a figure compares like with like."""
    return next(iter(by_kind(without_retried(records)).values()), [])
