"""Tests of the page of a memory snapshot: a real snapshot in a real browser."""

from __future__ import annotations

import gzip
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory import timeline as memory_view
from cs_systems.analysis.memory.tables import TABLES
from cs_systems.cli import main
from tests.report.browser import POINTER, Page, browse, data_of, looks, opened, phone_tooltip, texts_between_tags

SNAPSHOT = Path(__file__).parents[1] / "data" / "snapshot_h200_step.pickle.gz"
EVIL = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\"><!-- forward"
POINTER += """const line = byName("timeline"), blocks = byName("segments");
// The tooltips of a column of the timeline, from bottom to top, each allocation once.
function column(canvas, x) {
  const seen = [];
  for (let y = canvas.clientHeight - 5; y > 24; y--) {
    event(canvas, "pointermove", x, y);
    const lines = tipLines();
    if (lines && lines.join() !== seen.at(-1)?.join()) seen.push(lines);
  }
  return seen;
}
"""


def page_of(snapshot: Path, folder: Path, *options: str) -> str:
    page = folder / "made.html"
    assert main(["snapshot", str(snapshot), "--format", "html", "--output", str(page), *options]) == 0
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(SNAPSHOT, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of the real snapshot with HTML as names of functions, files and ranges."""
    data: dict[str, Any] = pickle.loads(gzip.decompress(SNAPSHOT.read_bytes()))
    for event in data["device_traces"][0]:
        for frame in event["frames"]:
            frame["name"] = EVIL if frame["name"] == "silu" else frame["name"]
            frame["filename"] = frame["filename"].replace("train.py", f"{EVIL}.py")
    for mark in data["external_annotations"]:
        mark["name"] = EVIL
    folder = tmp_path_factory.mktemp("evil")
    (folder / "evil.pickle").write_bytes(pickle.dumps(data))
    return page_of(folder / "evil.pickle", folder)


def test_page_is_self_contained(any_page: str) -> None:
    assert data_of(any_page, "snapshot")["peak"]["bytes"] == 213_795_840


def test_page_states_peak_categories_and_captions(page: str) -> None:
    text = Page(page).text
    for expected in (
        "213,795,840 bytes) at event 161",
        "total 213,795,840 bytes at the peak; category unknown for 0",
        "allocated in backward and not freed in it",
        "as many parameters as gradients (26)",
        "a function named forward",
        "from autograd's own thread",
    ):
        assert expected in text
    shown = {table.caption.lower() for name, table in TABLES.items() if name != "out_of_memory"}  # no request failed
    assert shown <= texts_between_tags(page)


@pytest.mark.chromium
def test_hover_shows_stack_and_categories_at_peak(page: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = browse(
        tmp_path,
        page,
        POINTER
        + """
byName("to-peak").click();
timeline.draw();
const at = Math.round(((data.peak.at_ns - timeline.from) / (timeline.to - timeline.from)) * line.clientWidth);
const seen = { peak: column(line, at), before: range(line) };
event(line, "pointerleave", 0, 0);
seen.left = tipLines();
for (const name of ["0", "+", "ArrowRight", "-"]) { key(line, name); seen["key " + name] = range(line); }
event(line, "wheel", 400, 200, { deltaY: -400, ctrlKey: true });
seen.wheel = range(line);
byName("whole").click();
timeline.draw();
const silu = [];
for (let x = 0; x < line.clientWidth && !silu.length; x += 7) {
  silu.push(...column(line, x).filter((lines) => lines.at(-1).includes("silu")));
}
seen.silu = silu[0];
seen.build = document.documentElement.dataset.buildMs;
answer(seen);
""",
    )
    kinds = [lines[0].partition(":")[0] for lines in seen["peak"]]
    assert [*dict.fromkeys(kinds)] == ["parameters", "optimizer state", "workspaces", "activations", "temporaries"]
    block = next(lines for lines in seen["peak"] if any("block 3" in line for line in lines))
    assert "allocated in forward · block 3" in block
    assert any(re.fullmatch(r"alive for [\d.]+ .s, from [\d.]+ .s to [\d.]+ .s", line) for line in block)
    assert any("train.py:24 forward" in line for line in block)
    assert seen["left"] is None
    whole = 10_437_500
    assert seen["before"][1] - seen["before"][0] == pytest.approx(whole / 50, rel=0.01)
    assert seen["key 0"] == [0, whole]
    assert seen["key +"][1] - seen["key +"][0] == pytest.approx(whole / 2, abs=2)
    assert seen["key ArrowRight"][0] > seen["key +"][0]
    assert seen["wheel"][1] - seen["wheel"][0] < seen["key -"][1] - seen["key -"][0]
    assert seen["silu"][-1].splitlines()[:2] == ["functional.py:2397 silu", "train.py:16 forward"]
    assert "1.00 MiB added by rounding" in seen["silu"]
    assert float(seen["build"]) > 0


@pytest.mark.chromium
def test_timeline_levels_categories_and_segments_match_data(page: str, tmp_path: Path) -> None:
    """Check the drawn levels, one category alone, and the blocks of segments."""
    seen: dict[str, Any] = browse(
        tmp_path,
        page,
        POINTER
        + """
const buttons = [...byName("categories").children];
const seen = { legend: buttons.map((button) => button.textContent), highest: Math.max(...levels.total) };
seen.end = levels.total.at(-1);
seen.both = new Set(column(line, 500).map((lines) => lines[0].split(":")[0])).size;
buttons[5].click();
seen.pressed = buttons.map((button) => button.getAttribute("aria-pressed"));
timeline.draw();
seen.alone = [...new Set(column(line, 500).map((lines) => lines[0].split(":")[0]))];
seen.blocks = [];
for (let y = 30; y < blocks.clientHeight; y += 9) {
  for (let x = 3; x < blocks.clientWidth; x += 5) {
    event(blocks, "pointermove", x, y);
    if (tipLines()) seen.blocks.push(tipLines()[0]);
  }
}
answer(seen);
""",
    )
    assert seen["highest"] == 213_795_840
    assert seen["end"] == 0
    assert seen["legend"][:3] == ["parameters14.0 MiB", "optimizer state27.9 MiB", "workspaces64.0 MiB"]
    assert seen["both"] > 3
    assert seen["pressed"] == ["false"] * 5 + ["true", "false", "false"]
    assert seen["alone"] == ["activations"]
    assert {"segment of 32.0 MiB", "workspaces: 32.0 MiB", "free: 20.0 MiB"} <= {*seen["blocks"]}
    assert any(line.startswith("parameters: ") for line in seen["blocks"])


@pytest.mark.chromium
def test_html_in_names_is_shown_as_text(evil_page: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = browse(
        tmp_path,
        evil_page,
        POINTER
        + """
answer({
  tooltips: column(line, 300).flat().join(" "), title: document.title, images: document.images.length,
  scripts: document.scripts.length,
});
""",
    )
    assert EVIL in seen["tooltips"]
    assert seen["title"] == "Memory of evil.pickle"
    assert (seen["images"], seen["scripts"]) == (0, 2)  # the data and the page's script


@pytest.mark.chromium
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_width_of_phone(page: str, tmp_path: Path, dark: bool) -> None:
    tap = POINTER + """event(line, "click", 100, line.clientHeight - 20);"""
    assert phone_tooltip(tmp_path, page, tap, dark)[0].startswith("parameters: ")


@pytest.mark.chromium
def test_page_is_legible_in_light_dark_phone_print_and_forced_colours(page: str, tmp_path: Path) -> None:
    seen = looks(tmp_path, page)
    assert seen["dark"]["background"] == "rgb(21, 24, 28)"
    assert seen["print"]["background"] == "rgb(255, 255, 255)"
    assert seen["light"]["tools"]
    assert not seen["print"]["tools"]


@pytest.mark.chromium
def test_keyboard_reaches_search_details_stack_and_neighbours(page: str, tmp_path: Path) -> None:
    heading = "document.querySelector('#pinned h2')?.textContent ?? null"
    with opened(tmp_path, page) as tab:
        tab.press("/", *"silu")
        assert tab.evaluate("document.activeElement.id") == "search"
        assert tab.evaluate("byId('found').textContent").startswith("8 allocations; ")
        tab.press("Enter")
        assert tab.evaluate(heading) == "activations: 5.00 MiB"
        assert tab.evaluate("document.querySelector('#pinned pre').textContent").startswith("functional.py:2397 silu\n")
        assert "activations: 5.00 MiB" in tab.evaluate("byId('live').textContent")
        tab.press("Escape")
        assert tab.evaluate("document.activeElement.id") == "timeline"
        first = tab.evaluate("timeline.pinned.i")
        tab.press("ArrowRight")
        assert tab.evaluate("timeline.pinned.i") == first + 1
        tab.press("ArrowLeft", "ArrowUp", "ArrowDown")
        assert tab.evaluate("timeline.pinned.i") == first
        tab.press("Escape")
        assert tab.evaluate(heading) is None
        tab.press("?")
        assert tab.evaluate("byId('help').open")
        tab.press("Escape")
        tab.evaluate("byId('segments').focus()")
        tab.press("Enter")
        assert tab.evaluate("document.querySelectorAll('#pinned dt').length") > 3
        assert tab.evaluate("segments.pinned !== null && timeline.pinned === null")


# Each text that the chart writes on its canvas, in pixels, at several zooms with the peak at any place of the view. The
# dashed line is where the snapshot has it, and at the peak, or closely above.
TEXTS = """
const written = [], write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most = Infinity) {
  if (this.canvas === timeline.canvas) {
    written.push({ text, left: x, right: x + Math.min(this.measureText(text).width, most), y });
  }
  write.call(this, text, x, y, most);
};
const width = timeline.canvas.clientWidth, faults = new Set(), places = { left: 0, right: 0, "dashed beside": 0 };
function look(where) {
  written.length = 0;
  timeline.draw();
  const [top, dashed] = ["peak ", "dashed "].map((begin) => written.find(({ text }) => text.startsWith(begin)));
  if (!top || !dashed) return faults.add(`no label of the ${top ? "dashed line" : "peak"} at ${where}`);
  places[top.left > timeline.xAt(peak.at_ns) ? "right" : "left"] += 1;
  places["dashed beside"] += dashed.right < width - 10;
  for (const one of written) {
    if (one.left < 0 || one.right > width) faults.add(`${one.text} is cut at ${where}`);
    for (const other of written) {
      const meet = one !== other && Math.abs(one.y - other.y) < 11 && one.left < other.right && other.left < one.right;
      if (meet) faults.add(`${one.text} is over ${other.text} at ${where}`);
    }
  }
}
for (const above of [null, 1, 1.02, 1.08]) {
  if (above) {
    data.reserved = [[0, above * peak.bytes]];
    timeline.highest = above * peak.bytes;
  }
  for (const share of [1, 0.4, 0.1, 0.02]) {
    for (let part = 0.02; part < 1; part += 0.035) {
      const span = timeline.end * share;
      timeline.show(peak.at_ns - part * span, peak.at_ns + (1 - part) * span);
      look(`${share} of the time, the peak at ${part.toFixed(3)}`);
    }
  }
}
answer({ faults: [...faults], places });
"""


@pytest.mark.chromium
@pytest.mark.parametrize("width", [400, 1280])
def test_labels_of_the_timeline_neither_cut_nor_overlap_at_any_zoom(page: str, tmp_path: Path, width: int) -> None:
    seen = browse(tmp_path, page, TEXTS, width=width)
    assert seen["faults"] == []
    assert min(seen["places"].values()) > 0, "each place was tried"


@pytest.mark.chromium
def test_history_lists_events_around_the_chosen_one(page: str, tmp_path: Path) -> None:
    seen = browse(
        tmp_path,
        page,
        """
const texts = (row) => [...row.cells].map((cell) => cell.textContent);
const rows = () => [...document.querySelectorAll("#events tbody tr")].map(texts);
const seen = { first: rows() };
seen.current = document.querySelector("#events [aria-current] td").textContent;
document.querySelector("#events [aria-current] button").click();
seen.pinned = [...document.querySelectorAll("#pinned dd")].map((dd) => dd.textContent);
const slider = document.getElementById("event");
slider.value = "0";
slider.dispatchEvent(new Event("input"));
seen.begin = rows()[0];
seen.cursor = timeline.cursor;
answer(seen);
""",
    )
    assert seen["current"] == "161"  # the peak
    assert len(seen["first"]) == 15
    assert [row[2] for row in seen["first"][:3]] == ["allocate"] * 3
    assert ["161", "204 MiB"] in [[row[0], row[-1]] for row in seen["first"]]
    assert "event 161, at 2.57 ms" in seen["pinned"]
    assert seen["begin"][0] == "0"
    assert seen["cursor"] == 0


@pytest.mark.chromium
def test_page_states_limits_of_drawn_allocations_and_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_view, "MOST_ALLOCATIONS", 100)
    monkeypatch.setattr(memory_view, "MOST_BLOCKS", 20)
    page = page_of(SNAPSHOT, tmp_path)
    text = Page(page).text
    assert "the 100 allocations with the most bytes × time are drawn one by one; the other 433 form one band" in text
    assert re.search(r"the \d+ smallest segments are not drawn: they have too many blocks", text)
    seen = browse(tmp_path, page, POINTER + 'answer(column(line, 300).flat().join(" "));')
    assert "several allocations in one band: their maximum" in seen


@pytest.mark.chromium
def test_empty_snapshot_has_a_page(tmp_path: Path) -> None:
    """The snapshot has no segments, timestamps or allocations."""
    path = tmp_path / "bare.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[{"action": "oom", "size": 1}]]}))
    text = page_of(path, tmp_path)
    assert "The snapshot has no timestamps: events are drawn 1 µs apart." in " ".join(Page(text).text.split())
    assert browse(tmp_path, text, "answer(document.documentElement.dataset.readyMs);")


def test_html_format_rejects_table_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(SNAPSHOT), "--table", "layers", "--format", "html"]) == 2
    assert "--format html shows every table of one snapshot; leave out --table" in capsys.readouterr().err
