"""Check of a drawn figure for text that is cut or overlaps other text: `problems(figure) -> list[str]`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

SLACK = 1.0  # pixels of allowed overlap: a text's box is a little larger than its ink


def problems(drawn: Figure) -> list[str]:
    """Return a sentence for each text that leaves the figure, and for each two texts whose rendered boxes overlap."""
    drawn.draw_without_rendering()
    page = drawn.bbox
    boxes = [(text.get_text(), box) for text, box in _shown(drawn)]
    cut = [
        f"{text!r} is cut"
        for text, box in boxes
        if min(box.x0 - page.x0, box.y0 - page.y0, page.x1 - box.x1, page.y1 - box.y1) < -SLACK
    ]
    over = [f"{a!r} and {b!r} overlap" for (a, box_a), (b, box_b) in combinations(boxes, 2) if _overlap(box_a, box_b)]
    return [*cut, *over]


def _overlap(a: Bbox, b: Bbox) -> bool:
    wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return bool(wide > SLACK and high > SLACK)


def _shown(drawn: Figure) -> Iterator[tuple[Text, Bbox]]:
    """Yield the visible texts with their boxes, except undrawn labels of ticks outside their axis."""
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    hidden: set[Any] = set()
    for axes in drawn.findobj(Axes):
        assert isinstance(axes, Axes)
        for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    for text in drawn.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text, Text.get_window_extent(text)
