"""A column of the table of cells is declared once, next to the code that fills it, and found everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cs_systems.core.fields import Subject
from cs_systems.report.tables import layout
from cs_systems.report.tables.columns import COLUMNS

ROOT = Path(__file__).parents[2]
DECLARATIONS = {
    "    p99_s: float\n": (
        '    p95_s: Annotated[float, Column("slow step", "slow step: 95% of the steps are faster")]\n'
    ),
    '        "p99_s": quantile(known, 0.99),\n': '        "p95_s": quantile(known, 0.95),\n',
}
PROGRAM = """
import sys
import cs_systems
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, RunRecord, Sample
from cs_systems.report import schema
from cs_systems.report.frame import frame
from cs_systems.report.tables.records import render
from cs_systems.report.tables.records_document import tables

assert cs_systems.__file__.startswith(sys.argv[1]), cs_systems.__file__
samples = tuple(Sample(0, False, n / 1000, {"forward": n / 1000}, {}) for n in range(1, 102))
record = RunRecord("a", RunConfig().to_dict(), "ok", measurement=Measurement("monotonic", samples, 0.0))
whole = frame(record)
assert abs(whole.set_index("phase")["p95_s"]["step"] - 0.096) < 1e-9
assert whole["p95_s"].dtype == "float64"
names = [*whole.columns]
assert names[names.index("p95_s") + 1] == "p99_s"

text = render([record], columns=["size", "slow step", "forward.p95_ms"], width=200)
assert " ".join(text.splitlines()[1].split()) == "slow step forward slow step", text
assert "slow step: 95% of the steps are faster" in text.splitlines()
assert "slow step" not in render([record]), "the layout alone chooses what is shown without a request"
assert "p95_s" in render([record], "csv").splitlines()[0].split(",")
assert '"p95_s":0.096' in tables([record], ["cells"])
expected = {"type": ["number", "null"], "title": "slow step", "unit": "s"}
expected["description"] = "slow step: 95% of the steps are faster"
assert schema.cells()["properties"]["p95_s"] == expected

from scripts import docs_hooks
assert "| `p95_s` | number or null | s | slow step: 95% of the steps are faster |" in docs_hooks.schema().splitlines()
"""


def test_added_column_has_its_heading_and_note_in_every_format_and_in_the_docs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "cs_systems", tmp_path / "cs_systems", ignore=shutil.ignore_patterns("__pycache__"))
    phases = tmp_path / "cs_systems" / "report" / "frame_phases.py"
    text = phases.read_text()
    for before, line in DECLARATIONS.items():
        assert text.count(before) == 1
        text = text.replace(before, line + before)
    phases.write_text(text)
    path = os.pathsep.join(map(str, [tmp_path, ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_layouts_have_declared_columns_only() -> None:
    layouts = [*layout.LAYOUTS.values(), layout.OTHER]
    names = {name for one in layouts for name in (*one.first, *one.measured, *one.leaves)}
    names |= {*layout.ENDING, *layout.ESSENTIAL, *layout.MEMORY_COLUMNS, *layout.SILENT_COLUMNS}
    names |= {name for subject in Subject for name in layout.identity(subject.value)}
    assert {name.rpartition(".")[2] for name in names} <= COLUMNS.keys()
