r"""Tables as LaTeX: floats with a caption, a label and notes, for `\usepackage{booktabs,graphicx}` and any engine."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from cs_systems.core.printable import LEGIBLE
from cs_systems.report.tables.columns import UNKNOWN
from cs_systems.report.tables.fitting import pieces
from cs_systems.report.tables.paper import NEGATIVE, Line, PaperTable, laid_out
from cs_systems.report.tables.table import Table


def latex(tables: Sequence[Table], width: int | None, color: bool) -> str:
    """Format tables as floats that fit a column of a paper; a wider table is scaled down."""
    floats = (_float(table, number) for table in laid_out(tables) for number in range(len(table.parts)))
    return "\n\n".join(floats) + "\n"


def figure(file: str, name: str, caption: str, spans: bool) -> str:
    """Return a float with the figure in a file, as wide as the text; `spans`: it takes the width of the page."""
    kind = "figure*" if spans else "figure"
    lines = [rf"\begin{{{kind}}}", r"\centering", rf"\includegraphics[width=\linewidth]{{{file}}}"]
    return "\n".join([*lines, rf"\caption{{{escaped(caption)}}}", rf"\label{{fig:{name}}}", rf"\end{{{kind}}}"])


def escaped(text: str) -> str:
    """Return the text so that LaTeX shows it literally; long words get places where a line may end."""
    words = (r"\allowbreak{}".join(map(_characters, pieces(word))) for word in text.split())
    return " ".join(words).replace(r"-\allowbreak{}", "-")  # a line may end after a hyphen anyway


def _float(table: PaperTable, number: int) -> str:
    kind, label, part = "table*" if table.spans else "table", f"tab:{table.name}", table.parts[number]
    first = [rf"\caption{{{escaped(table.caption)}}}", rf"\label{{{label}}}"]
    continued = [rf"{{\centering Table~\ref{{{label}}}, continued\par}}"]
    return "\n".join(
        [
            rf"\begin{{{kind}}}",
            r"% requires \usepackage{booktabs,graphicx}",
            *([f"% {table.hidden}"] if table.hidden else []),
            *(continued if number else first),
            r"\centering\footnotesize",
            *(_grid(table, part.rows) if part.rows else []),
            *(_notes(part.notes) if part.notes else []),
            rf"\end{{{kind}}}",
        ]
    )


def _grid(table: PaperTable, rows: Sequence[Line]) -> list[str]:
    """Return the lines of the table itself, in a box that is made smaller if it is wider than the column."""
    columns = "".join("r" if numeric else "l" for numeric in table.numeric)
    return [
        r"\setlength{\tabcolsep}{0.5em}",
        rf"\sbox0{{\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
        r"\toprule",
        *(_row([_characters(cell) for cell in line]) for line in table.head),
        r"\midrule",
        *(_row([_cell(*one) for one in zip(row, table.numeric, table.widths_em, strict=True)]) for row in rows),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"  {' & '.join(cells)} \\\\"


def _cell(text: str, numeric: bool, width_em: float | None) -> str:
    if numeric:
        text = NEGATIVE.sub("−", text)
    if width_em is None:
        return _characters(text)
    return rf"\parbox[t]{{{width_em:g}em}}{{\raggedright\strut {escaped(text)}\strut}}"


def _notes(notes: Sequence[str]) -> list[str]:
    return [r"\par\smallskip\raggedright", *(rf"{escaped(note)}\par" for note in notes)]


_TEXT = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{c: f"{{{c}}}" for c in "[*"},  # after a row's \\, these characters would be read as arguments
    **{c: f"\\{name}{{}}" for c, name in {"æ": "ae", "Æ": "AE", "ø": "o", "Ø": "O", "œ": "oe", "Œ": "OE"}.items()},
    **{c: f"\\{name}{{}}" for c, name in {"ł": "l", "Ł": "L", "ı": "i", "ß": "ss"}.items()},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"\symbol{34}",  # babel makes the character itself a command in German
    "µ": r"\ensuremath{\mu}",  # the upright µ is a bitmap font in some installations
    "…": r"\ldots{}",
    "·": r"\textperiodcentered{}",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "—": r"\textemdash{}",
    UNKNOWN: r"\textendash{}",
    "⁄": "/",  # in the decomposition of ½
}
_SIGNS = r"""
− - → \rightarrow × \times ± \pm ≤ \leq ≥ \geq ≠ \neq ≈ \approx ∞ \infty √ \surd ∑ \sum ‖ \Vert
⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil
α \alpha β \beta γ \gamma δ \delta ε \varepsilon ζ \zeta η \eta θ \theta ι \iota κ \kappa λ \lambda μ \mu
ν \nu ξ \xi π \pi ρ \rho σ \sigma τ \tau υ \upsilon φ \varphi χ \chi ψ \psi ω \omega
Γ \Gamma Δ \Delta Θ \Theta Λ \Lambda Ξ \Xi Π \Pi Σ \Sigma Φ \Phi Ψ \Psi Ω \Omega
"""
_MATH: dict[str, str] = dict(re.findall(r"(\S) (\S+)", _SIGNS))
_RAISED = {"<super>": "textsuperscript", "<sub>": "textsubscript"}
# Combining characters → the commands of accents, those that every encoding of LaTeX's fonts has.
_ACCENTS = dict(
    zip("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327", "`'^~=u.\"rHvc", strict=True)
)


def _characters(text: str) -> str:
    """Return the text with every character escaped; `--` becomes no dash, and no line ends after it."""
    return "".join(map(_character, unicodedata.normalize("NFC", text))).replace("--", r"\mbox{-{}-}")


def _character(c: str) -> str:
    """Return one character for LaTeX.

    If its fonts lack the character, a replacement: `²` by its digit, others as in JSON.
    """
    if c in _TEXT:
        return _TEXT[c]
    if c in _MATH:
        return rf"\ensuremath{{{_MATH[c]}}}"
    if c.isascii():
        return c
    kind, *codes = unicodedata.decomposition(c).split() or [""]
    parts = [chr(int(code, 16)) for code in codes]
    if kind in _RAISED:
        return rf"\{_RAISED[kind]}{{{_characters(''.join(parts))}}}"
    if kind.startswith("<"):
        return _characters("".join(parts))
    if parts and parts[0] in _ACCENTS and (base := chr(int(kind, 16))).isascii():
        return rf"\{_ACCENTS[parts[0]]}{{{base}}}"
    return _characters(c.encode("ascii", LEGIBLE).decode())
