"""Picture of what a terminal shows first for a trace: the sentences of `cs-systems analyze`, and its first table.

    python scripts/answer_picture.py     # writes docs/assets/answer.svg, which README shows

Output: an SVG of text lines, in a font of the reader's machine; it loads nothing.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from html import escape
from pathlib import Path

from cs_systems.cli import main as cs_systems

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "answer.svg"
TRACE = "tests/data/kineto_h200_step.json.gz"
LAST = "optimizer"  # beginning of the last line that is shown
LETTER, LINE, MARGIN = 8.4, 20, 16  # px


def answer() -> list[str]:
    """Return the lines that the command prints, up to the end of the first table."""
    out = io.StringIO()
    with redirect_stdout(out):
        cs_systems(["analyze", str(ROOT / TRACE)])
    lines = out.getvalue().replace(f"{ROOT}/", "").splitlines()
    return lines[: next(n for n, line in enumerate(lines) if line.startswith(LAST)) + 1]


def picture(lines: list[str]) -> str:
    """Return the lines as an SVG, below the command that prints them."""
    shown = [f"$ cs-systems analyze {TRACE}", *lines]
    width = round(2 * MARGIN + LETTER * max(map(len, shown)))
    height = 2 * MARGIN + LINE * len(shown)
    texts = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (n + 0.75):g}"{_weight(line, n)}>{_kept(line)}</text>'
        for n, line in enumerate(shown)
        if line
    ]
    style = "text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#1f2328}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
            f'<style>{style}</style><rect width="{width}" height="{height}" rx="8" fill="#f6f8fa" stroke="#d0d7de"/>',
            *texts,
            "</svg>\n",
        ]
    )


def _kept(line: str) -> str:
    """Return the line for the SVG, with spaces that no viewer joins."""
    return escape(line).replace(" ", "\N{NO-BREAK SPACE}")


def _weight(line: str, number: int) -> str:
    return ' style="font-weight:bold"' if number == 0 or line.endswith(", per step") else ""


def main() -> int:
    PICTURE.write_text(picture(answer()), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
