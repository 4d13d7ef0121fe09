"""Helpers that compile a document of LaTeX or Typst, in one column or in two, as a paper is set."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests import extras

_LATEX = r"""\documentclass[10pt%s]{article}
\usepackage{booktabs,graphicx}
\usepackage[letterpaper,textwidth=%sin,textheight=9in,columnsep=0.25in]{geometry}
\begin{document}
%s
\end{document}
"""
_TYPST = """#set page(paper: "us-letter", columns: %s, margin: (x: %sin, y: 1in))
#set text(size: 10pt)
#set par(justify: true)
%s
"""


def pdf_of_latex(folder: Path, text: str, columns: int) -> bytes:
    """Return the PDF by pdflatex; fail if it stops, lacks a character, or anything is too wide or too tall."""
    extras.require("pdflatex")
    source = folder / f"paper{columns}.tex"
    source.write_text(_LATEX % (",twocolumn" * (columns == 2), {1: 5.5, 2: 6.75}[columns], text))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", source.name]
    run = subprocess.run(command, cwd=folder, capture_output=True, timeout=50, check=False)
    log = source.with_suffix(".log").read_text(errors="replace")
    assert run.returncode == 0, log[-3000:]
    wrong = r"^(?:Overfull .*|.*Float too large.*|Missing character.*|.*multiply defined.*)$"
    assert not re.findall(wrong, log, re.MULTILINE), log[-3000:]
    return source.with_suffix(".pdf").read_bytes()


def pdf_of_typst(folder: Path, text: str, columns: int) -> bytes:
    """Return the PDF by Typst; fail if it stops or warns."""
    extras.require("typst")
    import typst

    source = folder / f"paper{columns}.typ"
    source.write_text(_TYPST % (columns, {1: 1.5, 2: 0.875}[columns], text))
    pdf, warnings = typst.compile_with_warnings(source)
    assert not warnings
    assert isinstance(pdf, bytes)
    return pdf
