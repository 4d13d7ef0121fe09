"""Helpers that load a page in headless Chromium and read it after its scripts ran."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
]
ANSWER = """
function answer(seen) {
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = JSON.stringify(seen);
  top.document.body.append(probe);
}
"""
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
        assert not {"src", "href", "srcset", "action"} & attributes.keys()
        assert not [attribute for attribute in attributes if attribute.startswith("on")]
    assert [attributes.get("type") for tag, attributes in read.tags if tag == "script"] == ["application/json", None]
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    (data,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def texts_between_tags(page: str) -> set[str]:
    """Return the texts between tags, in lower case."""
    return {line.strip().lower() for line in re.sub(r"<[^>]*>", "\n", unescape(page)).splitlines()}


def browse(
    folder: Path, text: str, probe: str, fragment: str = "", width: int | None = None, dark: bool = False
) -> Any:
    """Return the argument of `answer(…)` in `probe`, a script that runs after the page's own.

    The page must log nothing to the console. `width` is the frame's in pixels, as on a phone; the window has 1280.
    """
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    text = text.replace("</body>", f"<script>{ANSWER}{{{probe}}}</script></body>")
    if width is not None:  # a frame, since a window is at least 500 pixels wide
        text = f'<iframe width="{width}" height="844" frameborder="0" srcdoc="{escape(text)}"></iframe>'
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, "--dump-dom", f"{file.as_uri()}{fragment}"], capture_output=True, text=True, timeout=50
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(Page(found[1]).text)


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
