"""Tables as Typst: figures with a caption, a label and notes.

Text is in string literals, so it is never read as markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.report.tables.fitting import pieces
from cs_systems.report.tables.paper import NEGATIVE, Line, PaperTable, laid_out
from cs_systems.report.tables.table import Table

_INSET_EM = 0.5  # on each side of a cell's text; the width of a column includes it
_MAY_BREAK = r"\u{200b}"  # zero-width space
_DASHES = r"-\u{2060}-\u{2060}"  # with word joiners: no line ends after the dashes of an option


def typst(tables: Sequence[Table], width: int | None, color: bool) -> str:
    """Format tables as figures that fit a column of a paper; a wider table is scaled down."""
    figures = (_figure(table, number) for table in laid_out(tables) for number in range(len(table.parts)))
    return "\n\n".join(figures) + "\n"


def figure(file: str, name: str, caption: str, spans: bool) -> str:
    """Return a figure of the picture in a file; `spans`: it takes the width of the page."""
    place = ' placement: auto, scope: "parent",' if spans else ""
    return f'#figure(image("{file}", width: 100%),{place} caption: {literal(caption)}) <fig:{name}>'


def literal(text: str) -> str:
    """Return a string literal with its two special characters escaped; long words get places where a line may end."""
    words = (_MAY_BREAK.join(map(_characters, pieces(word))) for word in text.split())
    return f'"{" ".join(words)}"'


def _characters(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("--", _DASHES)


def _figure(table: PaperTable, number: int) -> str:
    label, part = f"tab:{table.name}", table.parts[number]
    lines = [
        "#set text(size: 8pt, hyphenate: false)",
        "#set par(justify: false, leading: 0.5em, spacing: 0.6em)",
        *([f"#align(center)[@{label}, continued]"] if number else []),
        *(_grid(table, part.rows) if part.rows else []),
        *(_notes(part.notes) if part.notes else []),
    ]
    return "\n".join(
        [
            "#figure(",
            *([f"  // {table.hidden}"] if table.hidden else []),
            *(['  placement: auto, scope: "parent",'] if table.spans else []),
            *([f'  kind: "{label}", supplement: none,'] if number else []),
            *([] if number else [f"  kind: table, caption: figure.caption(position: top, {literal(table.caption)}),"]),
            "  [",
            *(f"    {line}" for line in lines),
            "  ],",
            ")" if number else f") <{label}>",
        ]
    )


def _grid(table: PaperTable, rows: Sequence[Line]) -> list[str]:
    """Return the lines of the table itself, which is made smaller if it is wider than the column."""
    columns = ", ".join("auto" if width is None else f"{width + 2 * _INSET_EM:g}em" for width in table.widths_em)
    align = ", ".join("right" if numeric else "left" for numeric in table.numeric)
    head = [f"    {_row([literal(cell) for cell in line])}" for line in table.head]
    body = [f"  {_row([_cell(*one) for one in zip(row, table.numeric, strict=True)])}" for row in rows]
    return [
        "#let body = table(",
        f"  columns: ({columns},), align: ({align},), stroke: none, inset: (x: {_INSET_EM}em, y: 0.3em),",
        "  table.hline(),",
        "  table.header(",
        *head,
        "  ),",
        "  table.hline(stroke: 0.5pt),",
        *body,
        "  table.hline(),",
        ")",
        "#layout(space => {",
        "  let width = measure(body).width",
        "  if width > space.width { scale(100% * (space.width / width), reflow: true, body) } else { body }",
        "})",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"{', '.join(cells)},"


def _cell(text: str, numeric: bool) -> str:
    return literal(NEGATIVE.sub("−", text) if numeric else text)


def _notes(notes: Sequence[str]) -> list[str]:
    return ["#set align(left)", *(f"#par({literal(note)})" for note in notes)]
