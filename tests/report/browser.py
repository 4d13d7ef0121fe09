"""Helpers that load a page in headless Chromium and read it after its scripts ran."""

from __future__ import annotations

import atexit
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from scripts.benchmarks._browser import Browser, Tab
from tests import extras

# Functions that send pointer and key events to a canvas, and read its tooltip.
POINTER = """
const byName = (id) => document.getElementById(id);
const event = (canvas, kind, x, y, more = {}) => {
  const box = canvas.getBoundingClientRect(), Kind = kind === "wheel" ? WheelEvent : PointerEvent;
  canvas.dispatchEvent(new Kind(kind, { clientX: box.left + x, clientY: box.top + y, cancelable: true, ...more }));
};
const key = (canvas, name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
const tipLines = () => (byName("tip").hidden ? null : [...byName("tip").children].map((line) => line.textContent));
const range = (canvas) => [Number(canvas.dataset.from), Number(canvas.dataset.to)];
"""
PHONE_PROBE = """
const tip = byName("tip").getBoundingClientRect();
answer({
  page: document.documentElement.scrollWidth, canvas: line.clientWidth, tip: [tip.left, tip.right], lines: tipLines(),
  background: getComputedStyle(document.body).backgroundColor,
});
"""


class Page(HTMLParser):
    """Parsed page: its tags with attributes, and its text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data


def data_of(page: str, name: str) -> Any:
    """Return the data that a page draws; check that the page loads nothing else and runs no other script."""
    read = Page(page)
    assert [tag for tag, _ in read.tags if tag in ("link", "iframe", "img", "object", "embed", "base")] == []
    for _, attributes in read.tags:
        assert not {"src", "srcset", "action"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
        assert not [attribute for attribute in attributes if attribute.startswith("on")]
    assert [attributes.get("type") for tag, attributes in read.tags if tag == "script"] == ["application/json", None]
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    (data,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def texts_between_tags(page: str) -> set[str]:
    """Return the texts between tags, in lower case."""
    return {line.strip().lower() for line in re.sub(r"<[^>]*>", "\n", unescape(page)).splitlines()}


@cache
def browser() -> Browser:
    """Return the browser that all tests of a process share."""
    made = Browser()
    atexit.register(made.close)
    return made


@cache
def shared_tab() -> Tab:
    """Return the tab that all tests of a process share: a new one starts a process of the browser."""
    return browser().open(Path(os.devnull))


@contextmanager
def opened(folder: Path, text: str, fragment: str = "", **emulated: Any) -> Iterator[Tab]:
    """Open a page; at the end it must have logged nothing and requested nothing but itself."""
    extras.require("chromium")
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    tab = shared_tab()
    try:
        tab.load(file, fragment=fragment, **emulated)
        yield tab
        problems = tab.problems()
        assert not problems, problems
    except BaseException:
        shared_tab.cache_clear()  # the page may still be busy
        raise


def browse(folder: Path, text: str, probe: str, fragment: str = "", **emulated: Any) -> Any:
    """Return the argument of `answer(…)` in `probe`, a script that runs after the page's own."""
    with opened(folder, text, fragment, **emulated) as tab:
        return tab.evaluate(f"new Promise((answer) => {{{probe}}})")


VIEWS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"width": 400, "height": 800},
    "phone, dark": {"width": 400, "height": 800, "dark": True},
    "forced colours": {"forced_colors": True},
    "print": {"media": "print", "width": 800},
}
LOOK = """new Promise((answer) => requestAnimationFrame(() => requestAnimationFrame(() => {
  const isBroken = (cell) => {
    const text = document.createRange();
    text.selectNodeContents(cell);
    const lines = new Set([...text.getClientRects()].map(({ top }) => top));
    return !cell.firstElementChild && !/[\\s-]/.test(cell.textContent.trim()) && lines.size > 1;
  };
  const style = getComputedStyle(document.body);
  answer({
    overflow: document.documentElement.scrollWidth - innerWidth,
    color: style.color, background: style.backgroundColor,
    cut: [...document.querySelectorAll("td.number")].filter((one) => getComputedStyle(one).whiteSpace !== "nowrap")
      .length,
    broken: [...document.querySelectorAll("td:not(.number, .wide)")].filter(isBroken).length,
    heads: [...document.querySelectorAll("th button")].filter((one) => getComputedStyle(one).display !== "contents")
      .length,
    tools: [...document.querySelectorAll(".tools")].filter((tools) => tools.offsetHeight).length,
    drawn: [...document.querySelectorAll("canvas")].map((canvas) => {
      const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      Object.assign(copy.canvas, { width: canvas.width, height: canvas.height });
      copy.drawImage(canvas, 0, 0);
      return new Set(new Uint32Array(copy.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
    }),
  });
})))"""


def looks(folder: Path, text: str) -> dict[str, dict[str, Any]]:
    """Return how a page looks in each of VIEWS, one after the other in one tab; check what holds in all.

    Nothing is wider than the window, every canvas is drawn, numbers and words stay in one line, and text differs from
    its background. Headings that print repeats on each page have no buttons, which would be empty there.
    """
    seen = {}
    with opened(folder, text) as tab:
        for name, view in VIEWS.items():
            tab.emulate(**view)
            seen[name] = look = tab.evaluate(LOOK)
            assert look["overflow"] <= 0, name
            assert look["cut"] == look["broken"] == 0, name
            assert all(colors > 4 for colors in look["drawn"]), name
            assert look["color"] != look["background"], name
    assert seen["print"]["heads"] == 0
    return seen


def phone_tooltip(folder: Path, page: str, tap: str, dark: bool) -> list[str]:
    """Return the tooltip after `tap` on the canvas `line`, and check that all fits a phone's width."""
    seen = browse(folder, page, tap + PHONE_PROBE, width=390, dark=dark)
    assert seen["page"] <= 390
    assert 300 < seen["canvas"] <= 390
    left, right = seen["tip"]
    assert 0 <= left < right <= 390
    assert seen["background"] == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    lines: list[str] = seen["lines"]
    return lines
