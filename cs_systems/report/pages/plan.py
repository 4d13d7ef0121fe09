"""Picture of the plan of an answer: a bar for now, and one after each remedy on top of those before it."""

from __future__ import annotations

from textwrap import shorten
from typing import NamedTuple

from markupsafe import Markup

from cs_systems.analysis.diagnosis import Answer
from cs_systems.core.printable import plain
from cs_systems.core.units import human, significant
from cs_systems.report.pages._svg import opened, rect, text
from cs_systems.report.palette import INK

CAPTION = {"s": "The step after each remedy of the plan", "bytes": "The peak after each remedy of the plan"}
WIDTH, ROW, BAR = 760.0, 44, 14  # lengths in px
LONGEST_NAME = 90  # characters of a remedy
BASIS = {"replayed": "expected", "forecast": "expected", "measured": "measured"}


class Bar(NamedTuple):
    """Bar: its name, its length with the range, and the basis of it."""

    name: str
    value: float
    low: float
    high: float
    how: str


def bars(answer: Answer) -> list[Bar]:
    """Return the bars of the plan; empty without one."""
    if not (plan := answer.plan):
        return []
    first = plan[0]
    made = [Bar("now, without the profiler" if first.recorded else "now", first.now, first.now, first.now, "")]
    for one in plan:
        assert one.expected is not None
        value, low, high, how = one.expected.value, one.expected.low, one.expected.high, one.expected.how
        made.append(Bar(shorten(plain(one.remedy), LONGEST_NAME, placeholder=" …"), value, low, high, BASIS[how]))
    return made


def picture(answer: Answer) -> tuple[str, Markup] | None:
    """Return the caption and the <svg> element of an answer's plan; None for an answer without one."""
    if not (made := bars(answer)):
        return None
    unit = answer.plan[0].unit
    scale = WIDTH / max(max(bar.value, bar.high) for bar in made)
    parts, before = list[str](), made[0].value
    for number, bar in enumerate(made):
        top = number * ROW
        length, until = bar.value * scale, max(bar.value, before) * scale
        parts.append(text(0, top + 14, bar.name, "ink", before=_numbers(bar, made[0].value, unit)))  # a phone sees both
        parts.append(rect(0, top + 20, until, BAR, "pale"))  # the time that the remedy saves
        parts.append(rect(0, top + 20, length, BAR, "blue"))
        if bar.low != bar.high:
            line = f"M{bar.low * scale:.1f} {top + 20 + BAR / 2}H{bar.high * scale:.1f}"
            parts.append(f'<path d="{line}" stroke="var(--ink,{INK.light})" stroke-width="1.5"/>')
        before = bar.value
    title = "; ".join(f"{bar.name}: {human(bar.value, unit)}" for bar in made)
    return CAPTION[unit], Markup(f"{opened(WIDTH, len(made) * ROW, title)}{''.join(parts)}</svg>")


def _numbers(bar: Bar, now: float, unit: str) -> str:
    times = f", {significant(now / bar.value, 2)} times" if bar.how and unit == "s" and bar.value else ""
    return " ".join(filter(None, [bar.how, human(bar.value, unit)])) + times
