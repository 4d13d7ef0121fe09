"""Files of a run for a paper: its tables in LaTeX and Typst, every figure as a .pdf, and the floats of the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cs_systems.record import RunRecord
from cs_systems.report.figures import plot
from cs_systems.report.figures.paper import PAGE_IN, width_in
from cs_systems.report.files import write_file
from cs_systems.report.frame import by_kind, without_retried
from cs_systems.report.tables import latex, typst
from cs_systems.report.tables.paper import label
from cs_systems.report.tables.records import tables


def write(records: Sequence[RunRecord], folder: Path) -> list[Path]:
    """Write the files into the folder, over an earlier call's files, and return their paths."""
    made = tables(records)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"tables.tex": latex.latex(made, None, False), "tables.typ": typst.typst(made, None, False)}
    files, floats, included = [], list[str](), list[str]()
    for stem, own, kind in _figures(records):
        file = folder / f"{stem}.pdf"
        drawn = plot.save(own, file, kind)
        caption, spans = plot.caption(own, kind), width_in(drawn) == PAGE_IN
        floats.append(latex.figure(file.name, stem, caption, spans))
        included.append(typst.figure(file.name, stem, caption, spans))
        files.append(file)
    if files:
        texts |= {"figures.tex": "\n\n".join(floats) + "\n", "figures.typ": "\n\n".join(included) + "\n"}
    for name, text in texts.items():
        write_file(folder / name, text.encode())
        files.append(folder / name)
    return files


def _figures(records: Sequence[RunRecord]) -> Iterator[tuple[str, list[RunRecord], str]]:
    """Yield each figure's name, such as `train-step-phases`, with its records and its kind."""
    for name, own in by_kind(without_retried(records)).items():
        for kind in plot.kinds(own):
            yield label(f"{name} {kind}"), own, kind
