"""Parts of pictures that are written as <svg> elements, in the colours of the page around them."""

from __future__ import annotations

from html import escape

from cs_systems.report.palette import INK, SHADES, SOFT


def opened(width: float, height: float, title: str) -> str:
    """Return the beginning of a picture without a background."""
    title = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="100%" role="img" '
        f'aria-label="{title}" style="font:12px system-ui,sans-serif"><title>{title}</title>'
    )


def text(x: float, y: float, words: str, tone: str, bold: bool = False, anchor: str = "start", before: str = "") -> str:
    """Return a line of text; `before` is bold, and the words follow it."""
    color = {"ink": INK, "soft": SOFT}[tone].light
    weight = ' font-weight="600"' if bold else ""
    line = f'<tspan font-weight="600">{escape(before)}</tspan><tspan dx="8">{escape(words)}</tspan>'
    return (
        f'<text x="{x:.1f}" y="{y}" fill="var(--{tone},{color})" text-anchor="{anchor}"{weight}>'
        f"{line if before else escape(words)}</text>"
    )


def rect(x: float, y: float, width: float, height: float, hue: str) -> str:
    fill = f"var(--{hue},{SHADES[hue].light})"
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"/>'
