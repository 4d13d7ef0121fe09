"""Driver of headless Chromium by the DevTools protocol through a pipe: one browser with a tab for each page."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)
TIMEOUT_S = 50
ABOVE_STANDARD = 10  # file descriptors from here on; Chromium reads the protocol from 3 and writes it to 4
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
NAMED_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    " ": ("Space", 32, " "),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
}
SHIFT = 8


class Browser:
    """Running browser with a separate, empty profile; a context manager that ends it."""

    def __init__(self) -> None:
        if CHROMIUM is None:
            raise SystemExit("Chromium is not installed: apt-get install chromium")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        flags = (*FLAGS, f"--user-data-dir={self._folder.name}")
        words = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), CHROMIUM, *flags]
        self._process = subprocess.Popen(
            words, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (theirs_in, theirs_out):
            os.close(end)
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and remove its profile."""
        self._process.kill()
        self._process.wait()
        for end in (self._in, self._out):
            os.close(end)
        self._folder.cleanup()

    @property
    def version(self) -> str:
        return str(self.call("Browser.getVersion")["product"]).rpartition("/")[2]

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Return the result of a method of the protocol. Raises RuntimeError if it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self.receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        """Return the next message, and keep it in `events` if it is one. Raises TimeoutError if none comes."""
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium sent nothing for {TIMEOUT_S} s")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError(f"Chromium ended with exit status {self._process.wait()}")
            self._rest += read
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, file: Path, *, fragment: str = "", **emulated: Any) -> Tab:
        """Return a new tab that has loaded the file; `emulated` are the arguments of `Tab.emulate`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call("Performance.enable", timeDomain="threadTicks")
        tab.load(file, fragment=fragment, **emulated)
        return tab


class Tab:
    """Tab with one page; a context manager that closes it."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session, self.loads = browser, target, session, 0

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
        self._forget()

    def load(self, file: Path, *, fragment: str = "", **emulated: Any) -> None:
        """Load the file, and drop the events of an earlier page."""
        self.emulate(**emulated)
        self._forget()
        self.loads += 1  # as a query: addresses that differ only in the fragment are not loaded
        self.call("Page.navigate", url=f"{file.absolute().as_uri()}?{self.loads}{fragment}")
        while not any(e["method"] == "Page.loadEventFired" for e in self.events()):
            self.browser.receive()

    def _forget(self) -> None:
        self.browser.events = [e for e in self.browser.events if e.get("sessionId") != self.session]

    def call(self, method: str, **parameters: Any) -> Any:
        return self.browser.call(method, self.session, **parameters)

    def events(self) -> list[dict[str, Any]]:
        return [event for event in self.browser.events if event.get("sessionId") == self.session]

    def emulate(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "", forced_colors: bool = False
    ) -> None:
        """Set the size of the window, the colour scheme, and the medium: `print`, or the screen."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "forced-colors": "active" if forced_colors else "none",
        }
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=media, features=listed)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; for a promise, its resolved value.

        Raises:
            RuntimeError: The expression threw an error.
        """
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", found))
        return found["result"].get("value")

    def processor_ms(self) -> float:
        """Return the CPU time of the page's main thread so far, in ms."""
        metrics = {metric["name"]: metric["value"] for metric in self.call("Performance.getMetrics")["metrics"]}
        return float(metrics["ThreadTime"]) * 1e3

    def press(self, *keys: str, shift: bool = False) -> None:
        """Press and release each key, as a person would."""
        for key in keys:
            code, number, text = NAMED_KEYS.get(key, ("", ord(key[0].upper()), key))
            event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": SHIFT if shift else 0}
            self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def drag(self, start: tuple[float, float], end: tuple[float, float], *, shift: bool = False) -> None:
        """Press the mouse's button at one point of the window, move to another and release it; equal points click."""
        modifiers = SHIFT if shift else 0
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        moves = [("mouseMoved", start, 0), ("mousePressed", start, 1), ("mouseMoved", middle, 1)]
        for kind, (x, y), pressed in [*moves, ("mouseMoved", end, 1), ("mouseReleased", end, 1)]:
            button = {"button": "left", "clickCount": 1} if pressed else {}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, modifiers=modifiers, **button)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """Return every console message, uncaught error, and request other than for the page itself."""
        found, requested = [], 0
        for event in self.events():
            kind, detail = event["method"], event["params"]
            if kind in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(f"{kind}: {json.dumps(detail)[:500]}")
            elif kind == "Network.requestWillBeSent":
                requested += 1
                if requested > 1:
                    found.append(f"request: {detail['request']['url']}")
        return found


def frames(tab: Tab, spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the CPU time in ms to draw each span of the timeline, including rasterisation."""
    taken = []
    for start, end in (spans[0], *spans):  # the first twice: the browser compiles the script
        tab.evaluate(f"timeline.show(timeline.end * {start}, timeline.end * {end})")
        before_ms = tab.processor_ms()
        tab.evaluate(DRAW)
        taken.append(tab.processor_ms() - before_ms)
    return taken[1:]


def frames_per_s(tab: Tab) -> float:
    """Return the frames per second while the timeline zooms in and out, one step per frame."""
    return float(tab.evaluate(f"new Promise((answer) => {{{ZOOMING}}})"))


# The browser shows at most 60 frames a second.
ZOOMING = """
const home = timeline.end, count = 120;
let begin, shown = 0;
requestAnimationFrame(function frame(now) {
  begin ??= now;
  if (shown === count) return answer((1000 * count) / (now - begin));
  const span = home * 0.93 ** Math.min(shown, count - shown);
  timeline.show((home - span) / 3, (home - span) / 3 + span);
  shown += 1;
  requestAnimationFrame(frame);
});
"""
# Reading a pixel waits until all is drawn.
DRAW = 'timeline.draw(); timeline.canvas.getContext("2d").getImageData(0, 0, 1, 1); null'


def zooms(deepest: float, factor: float) -> list[tuple[float, float]]:
    """Return spans of the timeline as fractions: from all of it to one part in `deepest`, each `factor` of the last."""
    spans, span = [], 1.0
    while span > 1 / deepest:
        spans.append((1 / 3, 1 / 3 + span))
        span *= factor
    return spans


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, ABOVE_STANDARD) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
