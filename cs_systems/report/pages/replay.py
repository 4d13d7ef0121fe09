"""Picture of one replayed step as an <svg> element: its rows as recorded, below them as replayed, on one time axis."""

from __future__ import annotations

from math import floor, log10

from cs_systems.analysis.replay.lanes import COPY, WAITS, WORK, Box, StepLanes
from cs_systems.core.units import human
from cs_systems.report.pages._svg import opened, rect, text
from cs_systems.report.palette import SOFT, paint

WIDTH, LEFT, ROW, BAR, HEAD, AXIS = 1000.0, 96.0, 16, 12, 26, 24  # lengths in px
PIXEL = 0.5  # boxes of a kind that are closer than this are drawn as one
TICKS = 6


def svg(step: StepLanes) -> str:
    """Return the picture, in the colours of the page around it; alone, in the colours of a white page."""
    longest_s = max(max((box.end_s for lane in one.lanes for box in lane.boxes), default=0.0) for one in step.versions)
    longest_s = max(longest_s, *(one.step_s for one in step.versions), 1e-9)
    scale = (WIDTH - LEFT - 8) / longest_s
    parts, top = list[str](), 0
    for version in step.versions:
        parts.append(text(0, top + 17, f"{version.name}: {human(version.step_s, 's')}", "ink", bold=True))
        top += HEAD
        for lane in version.lanes:
            parts.append(text(0, top + BAR - 2, lane.name, "soft"))
            for kind, start, end in _merged(lane.boxes, scale):
                x, width = LEFT + start, max(end - start, PIXEL)
                parts.append(rect(x, top, width, BAR, _hue(kind)))
            top += ROW
        top += 6
    parts += _axis(longest_s, scale, top)
    height = top + AXIS
    title = f"step {step.number}: " + ", ".join(f"{one.name} {human(one.step_s, 's')}" for one in step.versions)
    return f"{opened(WIDTH, height, title)}{''.join(parts)}</svg>"


def _merged(boxes: list[Box], scale: float) -> list[tuple[str, float, float]]:
    """Return (kind, start, end) in px; neighbouring boxes of one kind are merged if the gap would be invisible."""
    found: list[tuple[str, float, float]] = []
    for box in boxes:
        start, end = box.start_s * scale, box.end_s * scale
        if found and found[-1][0] == box.kind and start - found[-1][2] < PIXEL:
            found[-1] = box.kind, found[-1][1], max(end, found[-1][2])
        elif end - start >= PIXEL or not found or end - found[-1][2] >= PIXEL:
            found.append((box.kind, start, end))
    return found


def _hue(kind: str) -> str:
    return {WORK: "stone", WAITS: "pale"}.get(kind) or paint("copy" if kind == COPY else kind).hue


def _axis(longest_s: float, scale: float, top: int) -> list[str]:
    """Return the time axis: a line with ticks at round distances."""
    rough = longest_s / TICKS
    unit = 10 ** floor(log10(rough))
    every = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    color = f"var(--soft,{SOFT.light})"
    parts = [f'<path d="M{LEFT} {top}H{WIDTH - 8}" stroke="{color}"/>']
    for n in range(int(longest_s / every) + 1):
        x = LEFT + n * every * scale
        parts.append(f'<path d="M{x:.1f} {top}v4" stroke="{color}"/>')
        parts.append(text(x, top + 18, human(n * every, "s") if n else "0", "soft", anchor="middle"))
    return parts
