"""A page with a timeline in headless Chromium: how soon it can be used, and how long a frame of it takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1280,900")
PROBE = """<script>
const frames = [];
for (let span = timeline.end; span > timeline.end / %(deepest)s; span *= %(factor)s) {
  timeline.show(timeline.end / 3, timeline.end / 3 + span);
  const before = performance.now();
  timeline.draw();
  timeline.canvas.getContext("2d").getImageData(0, 0, 1, 1); // waits until it is drawn
  frames.push(performance.now() - before);
}
const told = document.createElement("pre");
told.id = "told";
told.textContent = JSON.stringify({ ...document.documentElement.dataset, ...%(also)s, frames });
document.body.append(told);
</script></body>"""


def command(profile: Path) -> list[str]:
    """Return the command of headless Chromium, without a page. Raises SystemExit if none is installed."""
    if CHROMIUM is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    return [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]


def opened(page: Path, *, deepest: float, factor: float, also: str = "{}") -> dict[str, Any]:
    """Return what the page reports in a new browser profile, and `frames`: ms of each zoom.

    The zooms go from the whole timeline to one part in `deepest`, each by `factor`. `also`: an object of the page's
    script.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "opened.html"
        probe = PROBE % {"deepest": deepest, "factor": factor, "also": also}
        copy.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
        words = [*command(Path(folder) / "profile"), "--dump-dom", copy.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout)
    if found is None:
        raise SystemExit(f"the page did not answer: {done.stderr}")
    return dict(json.loads(unescape(found[1])))
