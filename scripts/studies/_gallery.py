"""Gallery of the figures in profiles/: draws each again from its committed records, and checks that it is legible.

    python scripts/studies/_gallery.py        # draws all of them; fails if a text is cut or overlaps another one

A study's figure is drawn by its `Study`, from the folders that its page names after --measured; those of commands and
benchmarks are in OTHERS.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _index import PROFILES, ROOT
from _legible import problems
from _study import APART, FIGURE_FILE, ORDER, PAGE_FILE, Study, cells, picture_of, records_of

from cs_systems.record import RunRecord, read_records

Draw = Callable[[], Any]
_MEASURED = re.compile(r"--measured (.+)")
# file of the figure: (folder of its records, kind of diagram, choice of cells)
OTHERS: dict[str, tuple[str, str, Callable[[RunRecord], bool]]] = {
    "attention_h200/figure.svg": ("attention_h200", "time", lambda record: True),
    "attention_h200/lengths/d128_causal.svg": ("attention_h200/lengths", "rate", lambda record: _d_head(record) == 128),
    "attention_h200/lengths/d64_causal.svg": ("attention_h200/lengths", "rate", lambda record: _d_head(record) == 64),
    "comm/figure.svg": ("comm", "collectives", lambda record: True),
    "course/distributed_communication_single_node/figure.svg": (
        "course/distributed_communication_single_node",
        "collectives",
        lambda record: True,
    ),
    "course/parallel_own/streams.svg": ("course/parallel_own", "streams", lambda record: "streams" in record.results),
    "course/parallel_xl/streams.svg": ("course/parallel_xl", "streams", lambda record: "streams" in record.results),
    "precision/training.svg": ("precision", "curves", lambda record: record.config["workload"] == "training_curve"),
}


def _d_head(record: RunRecord) -> int | None:
    return record.run_config.shape and record.run_config.shape.d_head


def gallery() -> Iterator[tuple[Path, Draw]]:
    """Yield each committed figure with the function that draws it."""
    for name in (*ORDER, APART):
        for folder in (PROFILES / name, PROFILES / name / "cpu"):
            if (folder / FIGURE_FILE).is_file():
                yield folder / FIGURE_FILE, partial(_of_study, importlib.import_module(name).STUDY, folder)
    for file, (folder_name, kind, chosen) in OTHERS.items():
        yield PROFILES / file, partial(_of_records, PROFILES / folder_name, kind, chosen)


def _of_study(study: Study, folder: Path) -> Any:
    page = (folder / PAGE_FILE).read_text(encoding="utf-8")
    measured = [ROOT / part for found in _MEASURED.findall(page) for part in found.split()]
    draw = picture_of(study, cells(records_of(folder, measured)[0]))
    assert draw is not None, f"the records of {folder} fill no figure"
    return draw()


def _of_records(folder: Path, kind: str, chosen: Callable[[RunRecord], bool]) -> Any:
    from cs_systems.report.figures import plot

    return plot.figure([record for record in read_records(folder)[0] if chosen(record)], kind)


def draw_all() -> int:
    """Draw every figure; return exit status 1 if a text is cut or overlaps another one."""
    import matplotlib

    from cs_systems.report.figures import plot
    from cs_systems.report.figures.drawing import texts_from_outside

    status = 0
    for file, draw in gallery():
        written = plot.write(draw, file)
        with matplotlib.rc_context(plot.STYLE), texts_from_outside():
            found = problems(written)
        print(file.relative_to(ROOT), *found, sep="\n    ", flush=True)
        status |= bool(found)
    if status:
        print("texts of these figures are cut or overlap; change the figure's drawing", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(draw_all())
