"""Tables in a paper: LaTeX and Typst that compile, fit their column, and show every character literally."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cs_systems.cli import COMMANDS, comm, main, parallel
from cs_systems.report.reading import some_records
from cs_systems.report.tables import formats, latex, typst
from cs_systems.report.tables.paper import COLUMN, PAGE, laid_out
from cs_systems.report.tables.records import render
from cs_systems.report.tables.rows import plain_table
from cs_systems.report.tables.table import Table
from tests.cli.test_foreign_names import NAMES, records
from tests.report.papers import pdf_of_latex, pdf_of_typst

ROOT = Path(__file__).parents[2]
PROFILES, DATA = ROOT / "profiles", ROOT / "tests" / "data"
TRACE, SNAPSHOT = DATA / "kineto_h200_step.json.gz", DATA / "snapshot_h200_step.pickle.gz"
PEERS = PROFILES / "attention_h200" / "peers"
CASES: dict[str, tuple[object, ...]] = {
    "report": (PROFILES / "step_time",),
    "report --columns": (
        *(PROFILES / "step_time", "--columns", "size", "context_length", "mode", "precision", "median_ms", "range_ms"),
        *("tokens_per_s", "mfu", "peak_allocated_gib", "note", "backward.median_ms", "spread", "model_flops_per_s"),
    ),
    "report --pivot": (PEERS, "--pivot", "seq,d_head,causal:attention:median_ms"),
    "report --relative-to": (PROFILES / "attention_heads", "--relative-to", "attention=naive"),
    "report of a run without memory": (PROFILES / "attention_out_of_memory",),
    "compare": (PEERS, PROFILES / "attention_h100" / "peers"),
    "compare of traces": (TRACE, DATA / "kineto_h200_small2.json.gz"),
    "precision": ("--show", PROFILES / "precision"),
    "precision of dtypes": ("--show", PROFILES / "autocast_dtypes"),
    "precision of sums": ("--show", PROFILES / "low_precision_sums"),
    "analyze": (TRACE,),
    "analyze --what-if": (TRACE, "--what-if", "launches=free"),
    "analyze of ranks": (DATA / "ranks_h200",),
    "analyze of files": (TRACE, DATA / "kineto_h200_small2.json.gz"),
    "snapshot": (SNAPSHOT,),
    "snapshot of two": (SNAPSHOT, SNAPSHOT),
    "ab": ("true", "true", "--measure", "process", "--max-pairs", "2"),
    "memory --fits": (*("--size", "large", "2.7B", "--precision", "fp32", "bf16"), "--fits", "80GiB"),
    "comm": (PROFILES / "comm",),
    "parallel": (PROFILES / "data_parallel_variants",),
}
MEASURING: dict[str, Callable[..., list[str]]] = {"comm": comm.texts, "parallel": parallel.texts}


def document(case: str, format: str, folder: Path) -> str:
    """Return the output of a command in this format."""
    command, file = case.split()[0], folder / f"output.{format}"
    if command in MEASURING:
        return "\n".join(MEASURING[command](some_records(Path(str(CASES[case][0])))[0], format, None))
    assert main([command, *map(str, CASES[case]), "--format", format, "--output", str(file)]) == 0
    return file.read_text()


def test_every_command_with_these_formats_has_a_case() -> None:
    fields = {
        name: importlib.import_module(f"cs_systems.cli.{name}").ARGS.__dataclass_fields__.get("format")
        for name in COMMANDS
    }
    offering = {name for name, field in fields.items() if field and "printed" not in field.type.lower()}
    assert {case.split()[0] for case in CASES} == offering


@pytest.mark.pdflatex
@pytest.mark.parametrize("case", CASES)
def test_latex_of_every_command_compiles_and_fits_its_column(case: str, tmp_path: Path) -> None:
    text = document(case, "latex", tmp_path)
    assert text.count(r"\caption{") == text.count(r"\label{tab:")
    for columns in (1, 2):
        pdf_of_latex(tmp_path, text, columns)


@pytest.mark.typst
@pytest.mark.parametrize("case", CASES)
def test_typst_of_every_command_compiles(case: str, tmp_path: Path) -> None:
    text = document(case, "typst", tmp_path)
    assert text.count("caption: ") == text.count("<tab:")
    for columns in (1, 2):
        pdf_of_typst(tmp_path, text, columns)


@cache
def hostile(format: str) -> str:
    return render([record for name in NAMES.values() for record in records(name)], format)


@pytest.mark.pdflatex
def test_hostile_names_compile_in_latex(tmp_path: Path) -> None:
    pdf_of_latex(tmp_path, hostile("latex"), 2)


@pytest.mark.typst
def test_hostile_names_compile_in_typst(tmp_path: Path) -> None:
    pdf_of_typst(tmp_path, hostile("typst"), 2)


@pytest.mark.pdflatex
def test_every_character_of_the_package_and_of_european_names_compiles_in_latex(tmp_path: Path) -> None:
    files = "".join(file.read_text() for file in (ROOT / "cs_systems").rglob("*.py"))
    characters = sorted({c for c in files if c.isprintable()} | set(map(chr, range(0xA0, 0x180))))
    text = latex.escaped(" ".join(characters))
    assert text.isascii()
    pdf_of_latex(tmp_path, text, 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--warmup", r"\mbox{-{}-}warmup"),
        ("a − b → c", r"a \ensuremath{-} b \ensuremath{\rightarrow} c"),
        ("10⁻⁶ Kᵀ", r"10\textsuperscript{\ensuremath{-}}\textsuperscript{6} K\textsuperscript{T}"),
        ("½ ŷ é", r"1/2 \^{y} \'{e}"),
        ("注 🙂", r"\textbackslash{}u6ce8 \textbackslash{}ud83d\textbackslash{}ude42"),
        ("train_step", r"train\_step"),
        ("forward-backward", "forward-backward"),
        ("layers.0.attn.q_proj", r"layers.\allowbreak{}0.\allowbreak{}attn.\allowbreak{}q\_\allowbreak{}proj"),
    ],
)
def test_latex_shows_characters_that_its_fonts_lack(text: str, shown: str) -> None:
    assert latex.escaped(text) == shown


def test_typst_keeps_the_dashes_of_an_option_on_one_line() -> None:
    assert typst.literal('"--warmup"') == r'"\"-\u{2060}-\u{2060}warmup\""'


def numbers(columns: int, rows: int = 2, optional: tuple[str, ...] = ()) -> Table:
    """Return a table of numbers, each of seven characters, named `a_s`, `b_s` and so on."""
    table = plain_table(
        [{f"{chr(97 + n)}_x": 1234.5 + row for n in range(columns)} for row in range(rows)], "many numbers"
    )
    return Table(table.caption, table.columns, (), table.statuses, optional)


def test_table_that_fits_takes_one_column() -> None:
    most = COLUMN // (len("1,234") + 2)
    (fits,), (wider,) = laid_out([numbers(most)]), laid_out([numbers(most + 1)])
    assert not fits.spans
    assert wider.spans
    assert not wider.hidden


def test_table_that_may_lose_columns_takes_one_column_and_names_them() -> None:
    (made,) = laid_out([numbers(12, optional=("l_x", "k_x", "j_x", "i_x"))])
    assert not made.spans
    assert len(made.numeric) == 8
    assert made.hidden == "hidden columns: l x, k x, j x, i x; choose columns with cs-systems report DIR --columns"
    for format in (latex.latex, typst.typst):
        assert made.hidden in format([numbers(12, optional=("l_x", "k_x", "j_x", "i_x"))], None, False)


def test_table_wider_than_a_page_keeps_every_column() -> None:
    (made,) = laid_out([numbers(PAGE)])
    assert len(made.numeric) == PAGE


def test_headings_are_broken_above_narrow_numbers_and_end_above_the_units() -> None:
    rows = [{"cause": "launch-bound", "x": 1}]
    table = plain_table(rows, titles={"x": "share of wall time"})
    (made,) = laid_out([table])
    assert made.head == (("", "share of"), ("cause", "wall time"))


def test_tall_table_is_several_floats_with_one_caption_and_label() -> None:
    (made,) = laid_out([numbers(2, rows=100)])
    assert len(made.parts) == 3
    assert sum(len(part.rows) for part in made.parts) == 100
    text = latex.latex([numbers(2, rows=100)], None, False)
    assert text.count(r"\begin{table}") == 3
    assert text.count(r"\caption{") == 1
    assert text.count(r"Table~\ref{tab:many-numbers}, continued") == 2


def test_notes_that_do_not_fit_go_into_floats_of_their_own() -> None:
    table = plain_table([{"x": 1}], "c", notes=[f"note {number} " + "word " * 60 for number in range(12)])
    (made,) = laid_out([table])
    assert [len(part.rows) for part in made.parts] == [1, *[0] * (len(made.parts) - 1)]
    assert sum(len(part.notes) for part in made.parts) == 12
    assert len(made.parts) > 1


def test_labels_are_the_names_of_tables_and_differ() -> None:
    assert [one.name for one in laid_out([numbers(1), numbers(1)])] == ["many-numbers", "many-numbers-2"]
    assert r"\label{tab:train-step}" in render(records("x"), "latex")
    assert "<tab:train-step>" in render(records("x"), "typst")


def test_hyphen_before_a_number_is_a_minus() -> None:
    table = plain_table([{"change": -5.5}], "c")
    assert r"\ensuremath{-}5.50" in formats.latex.latex([table], None, False)
    assert '"−5.50"' in typst.typst([table], None, False)


@pytest.fixture
def paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder of a run's tables and figures for a paper."""
    assert main(["report", str(PROFILES / "comm"), "--paper", str(tmp_path / "paper")]) == 0
    written = {Path(line.removeprefix("paper: ")) for line in capsys.readouterr().err.splitlines()}
    assert written == {*(tmp_path / "paper").iterdir()}
    return tmp_path / "paper"


def test_paper_of_a_run_has_its_tables_and_every_figure(paper: Path) -> None:
    assert {file.name for file in paper.iterdir()} >= {"tables.tex", "tables.typ", "figures.tex", "figures.typ"}
    figures = [file.name for file in paper.glob("*.pdf")]
    text = (paper / "figures.tex").read_text()
    assert text.count(r"\caption{") == text.count(r"\label{fig:") == len(figures) > 0
    assert all(f"{{{name}}}" in text for name in figures)


@pytest.mark.pdflatex
def test_paper_of_a_run_compiles_in_latex(paper: Path) -> None:
    pdf_of_latex(paper, "\\input{tables}\n\\input{figures}", 2)


@pytest.mark.typst
def test_paper_of_a_run_compiles_in_typst(paper: Path) -> None:
    pdf_of_typst(paper, '#include "tables.typ"\n#include "figures.typ"', 2)


def test_paper_refuses_options_of_other_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", str(PROFILES / "comm"), "--paper", str(tmp_path / "paper"), "--format", "csv"]
    assert main(words) == 2
    assert "--paper writes every table and figure; leave out --format" in capsys.readouterr().err
    assert not (tmp_path / "paper").exists()
