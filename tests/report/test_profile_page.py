"""Tests of the page of a profile: real traces in a real browser."""

from __future__ import annotations

import gzip
import json
import math
import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.tables import TABLES, drawn_step
from cs_systems.analysis.attribution.timeline import results, view
from cs_systems.cli import main
from cs_systems.core.printable import LONGEST_NAME, within
from cs_systems.core.units import human
from cs_systems.readers import read
from cs_systems.readers.forms.modules import checked
from cs_systems.report.pages._packing import packed
from cs_systems.report.pages.profile import render
from tests.report.browser import POINTER, Page, browse, data_of, looks, opened, phone_tooltip, texts_between_tags

DATA = Path(__file__).parents[1] / "data"
EVIL = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\"><!-- {} & gemm"
# `find` moves the pointer over a chart until the tooltip begins with a text.
POINTER += """function find(canvas, begin, has = "") {
  for (let y = 33; y < canvas.clientHeight; y += 9) { // half a row
    for (let x = 2; x < canvas.clientWidth; x += 4) { // a box is found from three pixels beside it
      event(canvas, "pointermove", x, y);
      const lines = tipLines();
      if (lines && lines[0].startsWith(begin) && lines.some((line) => line.includes(has))) return { x, y, lines };
    }
  }
  return null;
}
function hues(canvas) {
  const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  Object.assign(copy.canvas, { width: canvas.width, height: canvas.height });
  copy.drawImage(canvas, 0, 0);
  const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  const counts = new Map();
  for (let i = 0; i < pixels.length; i += 4) {
    const rgb = pixels.slice(i, i + 3).join();
    counts.set(rgb, (counts.get(rgb) ?? 0) + 1);
  }
  return [...counts].filter(([, n]) => n > 60).map(([rgb]) => rgb).sort();
}
const line = byName("timeline"), ice = byName("icicle");
"""
MOVES = """
const seen = { start: range(line), shown: byName("shown").textContent };
seen.build = document.documentElement.dataset.buildMs;
seen.step = find(line, "step", "host range").lines;
seen.kernel = find(line, "", "family: matmul").lines;
event(line, "pointerleave", 0, 0);
seen.left = tipLines();
const middle = line.clientWidth / 2;
event(line, "wheel", middle, 50, { deltaY: -400 });
seen.scrolls = range(line);
event(line, "wheel", middle, 50, { deltaY: -400, ctrlKey: true });
seen.wheel = range(line);
event(line, "wheel", middle, 50, { deltaX: 100 });
seen.sideways = range(line);
event(line, "pointerdown", 600, 50, { pointerId: 1 });
event(line, "pointermove", 500, 50, { pointerId: 1 });
event(line, "pointerup", 500, 50, { pointerId: 1 });
seen.dragged = range(line);
for (const name of ["+", "ArrowRight", "ArrowLeft", "-", "0"]) { key(line, name); seen["key " + name] = range(line); }
const block = find(line, "block 2", "host range");
event(line, "dblclick", block.x, block.y);
seen.focused = range(line);
byName("out").click();
seen.button = range(line);
byName("whole").click();
seen.whole = range(line);
event(line, "pointerdown", 500, 50, { pointerId: 1 });
event(line, "pointerdown", 700, 50, { pointerId: 2 });
event(line, "pointermove", 900, 50, { pointerId: 2 });
event(line, "pointerup", 900, 50, { pointerId: 2 });
event(line, "pointerup", 500, 50, { pointerId: 1 });
seen.pinched = range(line);
answer(seen);
"""


def profile_of(path: Path) -> Profile:
    return profile(read(path))


def page_of(seen: Profile, title: str = "a step") -> str:
    return render(view(seen), results(seen), title)


@pytest.fixture(scope="module")
def nsys_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nsys") / "step.sqlite"
    path.write_bytes(gzip.decompress((DATA / "nsys_h200_step.sqlite.gz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def page(nsys_path: Path) -> str:
    return page_of(profile_of(nsys_path))


def changed(path: Path, target: Path, *statements: tuple[str, tuple[object, ...]]) -> Profile:
    """Return the profile of the export after running SQL statements on it."""
    target.write_bytes(path.read_bytes())
    database = sqlite3.connect(target)
    for statement, values in statements:
        database.execute(statement, values)
    database.commit()
    database.close()
    return profile(read(target))


@pytest.fixture(scope="module")
def evil_page(nsys_path: Path) -> str:
    """Return the page of the real step with HTML as names of kernels, a range, the device and the file."""
    names = "SELECT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL"
    seen = changed(
        nsys_path,
        nsys_path.with_name("evil.sqlite"),
        (f"UPDATE StringIds SET value = ? WHERE value LIKE '%gemm%' AND id IN ({names})", (EVIL,)),
        ("UPDATE NVTX_EVENTS SET text = ? WHERE text = 'ffn'", (EVIL,)),
        ("UPDATE TARGET_INFO_GPU SET name = ?", (EVIL,)),
    )
    return page_of(seen, EVIL)


def test_page_is_self_contained(any_page: str) -> None:
    assert data_of(any_page, "profile")["step"]["kernels"] == 238


def test_page_states_step_coverage_and_captions(page: str) -> None:
    text = Page(page).text
    for expected in (
        "NVIDIA H200",
        "GPU busy27.3%",
        "wall clock of step 1, profiled5.91 ms",
        "One step of 3: step 1, 5.91 ms, has the median wall time; the numbers at the top are its own. "
        "The tables are means over all steps of 6.32 ms on average",
        "Of the step chosen above. Each row divides the row above it.",
        "Times include the profiler's overhead: use them for shares and causes, not as timings.",
        "980 µs of 1.61 ms of kernel time in this step belong to no layer or named module; these kernels are hatched",
        "100.0% of the kernel time belongs to a phase, and 39.2% to a layer or named module",
    ):
        assert expected in text
    # of one GPU, whose host makes a CUDA call every few µs, and which updates the weights
    absent = ("overlap", "host_gaps", "cpu_updates")
    captions = {table.caption.lower() for name, table in TABLES.items() if name not in absent}
    assert captions <= texts_between_tags(page)
    assert 'title="void at::native::' in page  # the full name, while the table shows the short one


def test_page_draws_the_step_that_the_terminal_names(nsys_path: Path) -> None:
    for path in (nsys_path, DATA / "kineto_h200_step.json.gz"):
        seen = profile_of(path)
        step = view(seen)["step"]
        opening = f"opens at step {step['number']}, which took {human(step['wall_ns'] * 1e-9, 's')}; "
        mean_s = sum(row["wall_s"] for row in results(seen)["steps"]) / 3
        expected = f"{opening}the tables are means over 3 steps of {human(mean_s, 's')} on average"
        assert drawn_step(results(seen)["steps"]) == expected
    assert drawn_step(results(seen)["steps"][:1]) == ""


def test_table_sort_keys_are_finite_numbers(page: str) -> None:
    keys = [attributes["data-v"] for _, attributes in Page(page).tags if "data-v" in attributes]
    assert keys
    assert all(math.isfinite(float(key)) for key in keys if key)


def test_page_counts_kernels_of_cuda_graphs(nsys_path: Path, tmp_path: Path) -> None:
    graph = ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 5 WHERE registersPerThread > 100", ())
    text = Page(page_of(changed(nsys_path, tmp_path / "graph.sqlite", graph))).text
    assert re.search(r"\d+ kernels of this step ran in CUDA graphs, from \d+ launch", text)


@pytest.mark.chromium
def test_overlapping_ranges_share_two_rows(nsys_path: Path, page: str, tmp_path: Path) -> None:
    """Each range begins before the previous one ends; one row for each would give 100 rows."""
    start = "(SELECT start FROM NVTX_EVENTS WHERE text = 'backward' ORDER BY start LIMIT 1 OFFSET 1)"
    thread = "(SELECT max(globalTid) + 1 FROM NVTX_EVENTS WHERE text = 'backward')"
    loads = [
        (
            "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, text) "
            f"VALUES ({start} + ?, {start} + ?, 60, {thread}, 'load')",
            (n * 10_000, n * 10_000 + 15_000),
        )
        for n in range(100)
    ]
    loaded = page_of(changed(nsys_path, tmp_path / "loads.sqlite", *loads))
    before = browse(tmp_path, page, POINTER + "answer(line.clientHeight);")
    after = browse(tmp_path, loaded, POINTER + "answer({ height: line.clientHeight, load: find(line, 'load') });")
    assert after["height"] - before == 22 + 2 * 18  # a title and two rows
    assert after["load"]["lines"][0] == "load"


@pytest.mark.chromium
def test_trace_without_kernels_shows_host_ranges(nsys_path: Path, tmp_path: Path) -> None:
    drop = [(f"DROP TABLE CUPTI_ACTIVITY_KIND_{name}", ()) for name in ("KERNEL", "RUNTIME", "MEMCPY")]
    page = page_of(changed(nsys_path, tmp_path / "cpu.sqlite", *drop))
    assert "no kernels: the times are those of the ranges on the host" in Page(page).text
    probe = (
        POINTER
        + "answer({ block: find(line, 'block 3').lines, canvases: document.querySelectorAll('canvas').length });"
    )
    seen = browse(tmp_path, page, probe)
    assert seen["block"][-1] == "host range"
    assert seen["canvases"] == 2  # there is no icicle chart without kernels


@pytest.mark.chromium
def test_timeline_supports_hover_zoom_pan_keys_and_double_click(page: str, nsys_path: Path, tmp_path: Path) -> None:
    seen: dict[str, Any] = browse(tmp_path, page, POINTER + MOVES)
    step = view(profile_of(nsys_path))["step"]
    begin, wall = step["start_ns"], 5_910_726
    assert seen["start"] == seen["scrolls"] == seen["key 0"] == seen["whole"] == [begin, begin + wall]
    assert re.fullmatch(r"7\.\d\d ms … 13\.\d ms of [\d.]+ ms recorded\.", seen["shown"])
    assert float(seen["build"]) > 0
    assert seen["step"] == ["step", "5.91 ms, starting at 7.25 ms", "host range"]
    assert seen["left"] is None
    kernel = seen["kernel"]
    assert any(re.fullmatch(r"grid [\d×]+ · block [\d×]+ · \d+ registers · [\d,]+ B shared", line) for line in kernel)
    assert any(re.fullmatch(r"phase: forward · layer: \w.*", line) for line in kernel)
    assert any(re.fullmatch(r"launch began [\d.]+ .s before the kernel", line) for line in kernel)
    from_, to = seen["wheel"]
    assert (from_ + to) / 2 == pytest.approx(begin + wall / 2, rel=1e-3)  # zooming keeps the point under the pointer
    assert to - from_ == pytest.approx(wall * 0.449, rel=1e-2)
    span = to - from_
    assert seen["sideways"][0] > from_
    assert seen["dragged"][0] > seen["sideways"][0]
    assert seen["dragged"][1] - seen["dragged"][0] == pytest.approx(span, abs=2)
    assert seen["key +"][1] - seen["key +"][0] == pytest.approx(span / 2, abs=2)
    assert seen["key ArrowRight"][0] - seen["key +"][0] == pytest.approx(span / 16, abs=2)
    assert seen["key ArrowLeft"] == pytest.approx(seen["key +"], abs=2)
    assert seen["key -"] == pytest.approx(seen["dragged"], abs=2)
    block = 1_502_000 - 1_057_000
    assert block < seen["focused"][1] - seen["focused"][0] < 1.2 * block
    assert seen["button"][1] - seen["button"][0] == pytest.approx(2 * (seen["focused"][1] - seen["focused"][0]), abs=2)
    assert seen["pinched"][1] - seen["pinched"][0] == pytest.approx(wall / 2, rel=0.01)


@pytest.mark.chromium
def test_search_and_family_buttons_highlight_kernels(page: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = browse(
        tmp_path,
        page,
        POINTER
        + """
const seen = { before: hues(line), icicle: hues(ice) }, search = byName("search");
const families = [...byName("families").children];
seen.families = families.map((button) => button.textContent);
search.value = "SOFTMAX forward";
search.dispatchEvent(new Event("input"));
seen.searched = byName("found").textContent;
timeline.draw();
seen.dimmed = hues(line);
search.value = "";
search.dispatchEvent(new Event("input"));
seen.cleared = byName("found").textContent;
search.value = "softmax";
search.dispatchEvent(new Event("input"));
search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
seen.next = [range(line), find(line, "softmax_warp").lines[0]];
key(line, "0");
search.value = "";
search.dispatchEvent(new Event("input"));
families[0].click();
seen.family = [byName("found").textContent, families.map((button) => button.getAttribute("aria-pressed"))];
families[0].click();
seen.released = [byName("found").textContent, families[0].getAttribute("aria-pressed")];
seen.leaf = find(ice, "forward → block 1 → attention.softmax → softmax").lines;
seen.backward = find(ice, "backward", "142 kernels").lines;
answer(seen);
""",
    )
    assert seen["families"][0] == "matmul67.2%"
    searched = r"5 kernels, 2\d\.\d µs: 1\.\d% of the kernel time of step 1; 15 in all steps, marked above the timeline"
    assert re.fullmatch(searched, seen["searched"])
    assert seen["dimmed"] != seen["before"]
    assert (seen["cleared"], seen["released"]) == ("", ["", "false"])
    assert seen["next"][0][1] - seen["next"][0][0] < 100_000
    assert seen["next"][1] == "softmax_warp_backward"  # the first one after the middle of the step
    assert "67.2% of the kernel time of step 1; " in seen["family"][0]
    assert seen["family"][1] == ["true"] + ["false"] * (len(seen["families"]) - 1)
    assert re.fullmatch(r"[\d.]+ µs in 1 kernel", seen["leaf"][1])
    assert seen["leaf"][3] == "100.0% of attention.softmax"
    assert re.fullmatch(r"[\d.]+ µs in 142 kernels", seen["backward"][1])
    assert len(seen["icicle"]) > 10  # colours of families, phases and layers


OVERVIEW = """
const shown = byName("overview"), search = byName("search"), marks = () => {
  const pixels = overview.still.getContext("2d").getImageData(0, shown.height - 5, shown.width, 1).data;
  return [...new Array(shown.width).keys()].filter((x) => pixels[4 * x + 3] && !pixels[4 * x - 1]).length;
};
const seen = { before: marks(), view: range(line) };
search.value = "optimizer";
search.dispatchEvent(new Event("input"));
timeline.draw();
Object.assign(seen, { marks: marks(), hits: asked.hits.length, still: range(line) });
event(shown, "pointerdown", shown.clientWidth - 1, 5, { pointerId: 1 });
event(shown, "pointerup", shown.clientWidth - 1, 5, { pointerId: 1 });
seen.moved = range(line);
seen.covered = [];
for (const chart of charts()) for (const row of chart.rows) {
  scrollTo(0, 0);
  chart.pin({ row, i: row.size >> 1 }, true);
  const top = chart.canvas.getBoundingClientRect().top + row.top;
  if (top < 0 || top + ROW > details.box.getBoundingClientRect().top) seen.covered.push(row.title);
}
answer({ ...seen, end: timeline.end });
"""


@pytest.mark.chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_overview_marks_hits_of_all_steps_and_moves_the_view(page: str, tmp_path: Path, width: int) -> None:
    """Details are shown next to what they speak of, never above it."""
    seen = browse(tmp_path, page, POINTER + OVERVIEW, width=width)
    assert seen["before"] == 0
    assert 2 <= seen["marks"] <= seen["hits"]  # hits of the same pixel share a line
    assert seen["still"] == seen["view"]  # nothing moves before Enter
    assert seen["moved"][1] == pytest.approx(seen["end"], abs=2)
    assert seen["moved"][1] - seen["moved"][0] == pytest.approx(seen["view"][1] - seen["view"][0], abs=2)
    assert seen["covered"] == []


TREE = """
const seen = {};
for (const by of ["range", "host", "phase"]) {
  document.querySelector(`input[name=by][value=${by}]`).click();
  seen[by] = icicle.rows.slice(0, 4).map((row) => row.boxes.map((box) => [nameOf(box), box.time]));
  const ends = (box) => box.start + box.time;
  const outside = (box) => box.parent && (box.start < box.parent.start - 2 || ends(box) > ends(box.parent) + 2);
  seen[by + " outside"] = icicle.rows.flatMap((row) => row.boxes.filter(outside)).length;
  seen[by + " tip"] = icicle.rows[1].tip(0);
}
document.querySelector("input[name=by][value=range]").click();
const row = icicle.rows[3];
icicle.pin({ row, i: 0 });
answer({ ...seen, searched: byName("search").value, name: nameOf(row.boxes[0]) });
"""


@pytest.mark.chromium
def test_icicle_shows_host_time_by_ranges_and_code_with_the_longest_at_the_left(page: str, tmp_path: Path) -> None:
    seen = browse(tmp_path, page, POINTER + TREE)
    for by in ("range", "host"):
        (root,), threads, *_ = seen[by]
        assert root[0] == "host time of step 1"
        assert threads[0][0] == "main thread"
        assert threads == sorted(threads, key=lambda box: -box[1])
        assert sum(box[1] for box in threads) == pytest.approx(root[1])
        assert seen[f"{by} outside"] == 0
        assert re.fullmatch(r"[\d.]+ ms in \d+ calls?", seen[f"{by} tip"][1])
    assert seen["range"][2][0][0] == "step"
    assert seen["phase"][0][0][0] == "kernel time of step 1"
    assert seen["searched"] == seen["name"]


@pytest.mark.chromium
def test_html_in_names_is_shown_as_text(evil_page: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = browse(
        tmp_path,
        evil_page,
        POINTER
        + """
const tags = () => byName("tip").querySelectorAll("b *, span *").length;
const seen = { kernel: find(line, "", "family: matmul").lines, tags: tags() };
seen.range = find(line, "<\\/script>").lines;
seen.title = document.title;
seen.heading = document.querySelector("h1").textContent;
seen.images = document.images.length;
seen.scripts = document.scripts.length;
answer(seen);
""",
    )
    assert seen["title"] == seen["heading"] == EVIL
    assert (seen["kernel"][0], seen["kernel"][-1]) == (within(EVIL, LONGEST_NAME), EVIL)
    assert seen["tags"] == 0  # an image's onerror would run only after this check
    assert (seen["range"][0], seen["range"][-1]) == (within(EVIL, LONGEST_NAME), EVIL)
    assert (seen["images"], seen["scripts"]) == (0, 2)  # the data and the page's script


# The product of Tensile that a step of a Llama runs on an MI300, and names that no rule of short names knows.
TENSILE = (
    "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT128x128x32_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0_"
    "DTLA0_DTLB0_DTVA0_DTVB0_EPS0_ELFLR0_EMLLn1_FDSI0_GRPM1_GRVWA8_GRVWB8_GSU1_GSUAMB_GLS0_ISA942_IU1_K1_LDSTI0_"
    "LBSPPA1024_LBSPPB1024_LBSPPM0_LPA16_LPB16_LPM0_LRVW8_LWPMn1_MIAV0_MIWT4_4_MO40_NTn1_NTA0_NTB0_NTC0_NTD4_NTM0_"
    "NEPBS16_NLCA1_NLCB1_ONLL1_PGL0_PGR2_PLR1_PKA1_SIA3_SS1_SPO0_SRVW0_SSO0_SVW4_SK0_SKXCCM0_TLDS1_ULSGRO0_USL1_"
    "UIOFGRO0_USFGROn1_VSn1_VWA4_VWB1_WSGRA0_WSGRB0_WS64_WG64_4_1"
)
OWN_NAMES = ("own_" + "kernel_" * 60 + "1", "ffn_" + "of_the_model_" * 40)
WIDTHS = """
const wide = (of) => [...document.querySelectorAll(of)].map((one) => one.getBoundingClientRect())
  .filter((box) => box.width && (box.right > innerWidth || box.left < 0)).length;
const measured = () => ({
  page: document.documentElement.scrollWidth - innerWidth,
  outside: wide("h1, h2, li, p, dl, dd, pre, button:not(table *), #tip:not([hidden]), #tip *"),
  heading: byName("pinned").querySelector("h2")?.offsetHeight, tip: byName("tip").offsetHeight,
});
const cellsOf = (table, column) => Object.fromEntries(
  [...byName(table).tBodies[0].rows].map(({ cells }) => [cells[column].title, cells[column].textContent]));
const seen = { cells: cellsOf("table-kernels", 0), ranges: cellsOf("table-ranges", 1), pins: [] };
for (const name of [TENSILE, OWN]) {
  const stream = data.streams[0], i = stream.function.findIndex((f) => names.name[functions.name[f]] === name);
  pinKernel(stream, i);
  ask({ kernel: name });
  tip.fill(kernelTip(stream, i));
  tip.place(innerWidth - 20, 300);
  seen.pins.push({
    ...measured(), copied: byName("pinned").innerText,
    chip: byName("asked").textContent, title: byName("asked").firstChild.title,
    tipHeading: tipLines()[0], tipWhole: tipLines().at(-1),
  });
}
answer(seen);
"""


@pytest.mark.chromium
@pytest.mark.parametrize("width", [400, 1280])
def test_names_of_500_characters_are_short_and_can_be_copied_whole(nsys_path: Path, tmp_path: Path, width: int) -> None:
    kernels = "SELECT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL"
    gemm = f"SELECT id FROM StringIds WHERE value LIKE '%gemm%' AND id IN ({kernels}) ORDER BY id LIMIT 1"
    add = f"SELECT id FROM StringIds WHERE value LIKE '%CUDAFunctor_add%' AND id IN ({kernels}) ORDER BY id LIMIT 1"
    own, of_range = OWN_NAMES
    seen = changed(
        nsys_path,
        tmp_path / "long.sqlite",
        (f"UPDATE StringIds SET value = ? WHERE id = ({gemm})", (TENSILE,)),
        (f"UPDATE StringIds SET value = ? WHERE id = ({add})", (own,)),
        ("UPDATE NVTX_EVENTS SET text = ? WHERE text = 'ffn'", (of_range,)),
    )
    script = WIDTHS.replace("TENSILE", json.dumps(TENSILE)).replace("OWN", json.dumps(own))
    found = browse(tmp_path, page_of(seen), POINTER + script, width=width, height=900)
    short = {TENSILE: "Cijk_Alik_Bljk_BBS 128x128x32", own: f"{own[:30]}…{own[-29:]}"}
    assert {name: found["cells"][name] for name in short} == short
    assert {len(text) for name, text in found["ranges"].items() if of_range in name} == {60}
    for name, pin in zip(short, found["pins"], strict=True):
        assert (pin["page"], pin["outside"]) == (0, 0)
        assert pin["heading"] < 60, "two lines"
        assert pin["copied"].startswith(short[name])
        assert name in pin["copied"]
        assert (pin["chip"], pin["title"]) == (f"kernel: {short[name]} ✕", name)
        assert (pin["tipHeading"], pin["tipWhole"]) == (short[name], name)


@pytest.mark.chromium
def test_page_is_legible_in_light_dark_phone_print_and_forced_colours(page: str, tmp_path: Path) -> None:
    seen = looks(tmp_path, page)
    assert seen["dark"]["background"] == "rgb(21, 24, 28)"
    assert seen["print"]["background"] == "rgb(255, 255, 255)"
    assert seen["light"]["tools"]
    assert not seen["print"]["tools"]


HEADING = "document.querySelector('#pinned h2')?.textContent ?? null"
TEXTS = (
    "(selector) => [...document.querySelectorAll(selector)].map((of) => [...of.children].map((of) => of.textContent))"
)
DETAILS = f"Object.fromEntries(({TEXTS})('#pinned dl div'))"


@pytest.mark.chromium
def test_keyboard_reaches_search_details_neighbours_launch_sums_and_help(page: str, tmp_path: Path) -> None:
    with opened(tmp_path, page) as tab:
        tab.press("/", *"softmax_warp_b")
        assert tab.evaluate("document.activeElement.id") == "search"
        tab.press("Enter")
        assert tab.evaluate(HEADING) == "softmax_warp_backward"
        assert "softmax_warp_backward" in tab.evaluate("byId('live').textContent")
        kernel = tab.evaluate(DETAILS)
        assert kernel["family"] == "softmax"
        assert kernel["phase"] == "backward"
        assert tab.evaluate("document.querySelector('#pinned pre').textContent").startswith("void ")
        assert tab.evaluate("document.querySelector('tr.pinned').textContent").startswith("softmax_warp_backward")
        assert tab.evaluate("icicle.marked.map(({ row, i }) => row.label(i))") == [
            "backward",
            "unattributed",
            "softmax",
        ]
        tab.press("Escape")
        assert tab.evaluate("document.activeElement.id") == "timeline"
        tab.press("l")
        assert tab.evaluate(HEADING) == "launch: softmax_warp_backward"
        tab.press("l")
        start = tab.evaluate("timeline.pinned.row.start[timeline.pinned.i]")
        tab.press("ArrowRight")
        assert tab.evaluate("timeline.pinned.row.start[timeline.pinned.i]") > start
        tab.press("ArrowLeft", "ArrowUp", "r")
        assert tab.evaluate(HEADING) == "unattributed"
        assert "sum of kernel times" in tab.evaluate("byId('range').textContent")
        tab.press("Escape", "Escape")
        assert tab.evaluate("byId('details').hidden")
        tab.press("?")
        assert tab.evaluate("byId('help').open")
        tab.press("Escape")
        tab.press("n")
        assert tab.evaluate(HEADING) == "softmax_warp_backward"
        tab.press("/", *"block 2", "Enter")
        assert tab.evaluate(HEADING) == "block 2"  # a range or a run of kernels
        assert "ranges and calls in all steps" in tab.evaluate("byId('found').textContent")
        tab.press("Escape", "Escape", "Escape")
        assert tab.evaluate("byId('found').textContent") == ""


@pytest.mark.chromium
def test_selected_range_is_summed(page: str, nsys_path: Path, tmp_path: Path) -> None:
    """A drag along the axis selects a range: its sums are those of the trace."""
    with opened(tmp_path, page) as tab:
        left, top = tab.evaluate("[byId('timeline').getBoundingClientRect()].map((box) => [box.left, box.top])[0]")
        tab.drag((left + 200, top + 8), (left + 900, top + 8))
        begin, end = tab.evaluate("timeline.selected")
        shown = dict(tab.evaluate(f"({TEXTS})('#range dl div')"))
        families = tab.evaluate(f"({TEXTS})('#range tbody tr')")
    (stream,) = view(profile_of(nsys_path))["streams"]
    parts = [
        (max(start, begin), min(start + duration, end))
        for start, duration in zip(stream["start"], stream["duration"], strict=True)
    ]
    times = [stop - start for start, stop in parts if stop > start]
    assert 20 < len(times) < 238
    assert shown["kernels"] == str(len(times))
    # One stream runs one kernel after the other: busy is their sum.
    assert shown["GPU 0 busy"].startswith(f"{100 * sum(times) / (end - begin):.1f}% (")
    assert sum(int(row[1]) for row in families) == len(times)
    assert sum(float(row[3].rstrip("%")) for row in families) == pytest.approx(100, abs=0.3)


@pytest.mark.chromium
def test_operators_are_drawn_next_to_kernels_and_each_kernel_names_its_operator(tmp_path: Path) -> None:
    trace = read(DATA / "kineto_h200_step.json.gz")
    seen = profile(trace)
    made = view(seen)
    got = browse(
        tmp_path,
        page_of(seen),
        """
const titles = timeline.rows.map((row) => row.title).filter(Boolean), found = [];
for (const i of [3, 300, 600]) {
  pinKernel(data.streams[0], i);
  found.push([data.streams[0].launch[i], [...document.querySelectorAll("#pinned dd button")].at(-1).textContent]);
}
byId("search").value = "aten::bmm";
search();
answer({ titles, found, searched: byId("found").textContent, faint: timeline.rows.every((row) => row.faint) });
""",
    )
    assert [title.split(" · ")[-1] for title in got["titles"]].count("operators") == 2  # of forward and of backward
    operators = trace.operators and trace.operators.ranges()
    assert operators is not None
    first = seen.steps[made["steps"][0]["number"]].start_s
    for launch_ns, name in got["found"]:
        at_s = first + launch_ns * 1e-9
        around = [op for op in operators if op.start_s - 1e-9 <= at_s < op.end_s]
        assert name == min(around, key=lambda op: op.end_s - op.start_s).name
    assert got["searched"].endswith("ranges and calls in all steps")
    assert got["faint"]


@pytest.mark.chromium
def test_step_selector_changes_timeline_icicle_and_shares(page: str, tmp_path: Path) -> None:
    seen = browse(
        tmp_path,
        page,
        POINTER
        + """
const seen = {}, select = byName("step"), now = () => [range(line), icicle.rows[0].label(0), icicle.end];
seen.options = [...select.options].map((option) => option.textContent);
for (const value of ["0", "all"]) {
  select.value = value;
  select.dispatchEvent(new Event("change"));
  seen[value] = now();
}
key(line, ".");
seen.after = select.value;
document.querySelector("#table-steps tbody td button").click();
seen.linked = select.value;
document.querySelector("#table-phases tbody tr:nth-child(2) td:nth-child(2) button").click();
seen.asked = [...byName("asked").children].map((chip) => chip.textContent);
answer(seen);
""",
    )
    assert [text.split(" · ")[0] for text in seen["options"]] == ["step 0", "step 1", "step 2", "all 3 steps"]
    assert seen["options"][1].endswith(" · median")
    assert seen["0"][0][0] == 0
    assert seen["0"][1] == "kernel time of step 0"
    assert seen["all"][1] == "kernel time of all 3 steps"
    assert seen["all"][2] > 2.9 * seen["0"][2]
    assert (seen["after"], seen["linked"]) == ("1", "0")
    assert seen["asked"] == ["phase: forward ✕", "family: matmul ✕"]


@pytest.mark.chromium
def test_icicle_and_tables_show_the_modules_of_the_model(nsys_path: Path, tmp_path: Path) -> None:
    rows = [
        {
            "path": "",
            "class": "Model",
            "range": "",
            "layer": "model",
            "parameters": 9,
            "stack": None,
            "block": None,
            "part": None,
        }
    ]
    for n in range(4):
        block = {"path": f"layers.{n}", "class": "Block", "range": f"block {n}", "block": f"block {n}", "part": None}
        inner = {
            "path": f"layers.{n}.attn",
            "class": "Attention",
            "range": "attention",
            "block": f"block {n}",
            "part": "attention",
        }
        rows += [{**row, "layer": f"block {n}", "stack": "layers", "parameters": 2} for row in (block, inner)]
    seen = profile(replace(read(nsys_path), modules=checked(rows)))
    got = browse(
        tmp_path,
        page_of(seen),
        """
const choice = document.querySelector("input[name=by][value=module]");
choice.click();
const labels = icicle.rows.map((row) => Array.from({ length: row.size }, (_, i) => row.label(i)));
const cell = [...document.querySelectorAll("#table-tree td button")].find((one) => one.textContent === "layers.*.attn");
cell.click();
answer({ labels, asked: byId("asked").textContent, found: byId("found").textContent });
""",
    )
    assert got["labels"][1] == ["layers", "unattributed"] or got["labels"][1] == ["unattributed", "layers"]
    assert {"0", "1", "2", "3"} <= {*got["labels"][2]}
    assert "attn" in got["labels"][3]
    assert got["asked"] == "module: layers.*.attn ✕"
    assert re.match(r"\d+ kernels, ", got["found"])


def test_page_shows_the_times_of_the_ranks(nsys_path: Path) -> None:
    seen = profile_of(nsys_path)
    peaks = {"peak_allocated_bytes": 1 << 30, "peak_reserved_bytes": None}
    ranks = [{"rank": rank, "phase": "forward", "median_s": 2e-3, "wait_s": rank * 1e-3, **peaks} for rank in (0, 1)]
    text = render(view(seen), {**results(seen), "ranks": ranks}, "two ranks")
    assert "ranks: median time of each phase" in texts_between_tags(text)
    assert "wait for the last rank" in texts_between_tags(text)


@pytest.mark.chromium
def test_opacity_of_narrow_boxes_is_the_share_of_the_pixel_that_they_cover(page: str, tmp_path: Path) -> None:
    """20,000 boxes, each as long as the gap after it: half of every pixel, from bins and, closer, box by box."""
    seen = browse(
        tmp_path,
        page,
        """
const size = 20000, end = 10 * size, row = {
  size, start: Float64Array.from({ length: size }, (_, i) => 10 * i), duration: new Float64Array(size).fill(5),
  shades: new Uint8Array(size).fill(palette.shade("matmul")),
};
palette.read();
const look = (from, to) => {
  const pixels = new Uint8ClampedArray(4 * 100), wide = mixed(row, { from, to, end }, 100, pixels, 0).length;
  const alpha = pixels.filter((_, k) => k % 4 === 3), [least, most] = [Math.min(...alpha), Math.max(...alpha)];
  return { wide, binned: Boolean(row.bins), least, most, rgb: [...pixels.slice(0, 3)] };
};
const close = look(0, end / 100);
answer({ close, whole: look(0, end), boxes: look(0, 100).wide, matmul: palette.rgb[palette.shade("matmul")] });
""",
    )
    assert (seen["close"]["binned"], seen["whole"]["binned"]) == (False, True)
    for look in (seen["close"], seen["whole"]):
        assert (look["wide"], look["rgb"]) == (0, seen["matmul"])
        assert 115 <= look["least"] <= look["most"] <= 140
    assert seen["boxes"] == 10  # each is wide enough to be drawn


@pytest.mark.chromium
def test_packed_columns_are_unpacked_to_the_same_numbers(tmp_path: Path, page: str) -> None:
    columns = {
        "short": [1, 2],
        "mixed": [0, -1, 63, 64, -64, -65, None, 2**52, -(2**52), *range(20)],
        "times": [n * 1_000_003 for n in range(50)],
        "begins unknown": [None] * 3 + [7] * 20,
        "texts": ["a", None] * 10,
    }
    assert isinstance(packed(columns)["times"], dict)
    text = json.dumps(json.dumps(packed(columns)))
    assert browse(tmp_path, page, f"answer(unpacked({text}))") == columns


@pytest.mark.chromium
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_width_of_phone(page: str, tmp_path: Path, dark: bool) -> None:
    tap = POINTER + """const tapped = find(line, "backward"); event(line, "click", tapped.x, tapped.y);"""
    assert phone_tooltip(tmp_path, page, tap, dark)[0] == "backward"


def test_analyze_writes_html_page(nsys_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["analyze", str(nsys_path), "--format", "html", "--output", str(page)]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"html: {page}\n")
    assert "<h1>step.sqlite, by nsys</h1>" in page.read_text(encoding="utf-8")
    for name, value in (("--top", "3"), ("--table", "gaps")):
        assert main(["analyze", str(nsys_path), name, value, "--format", "html"]) == 2
        assert (
            f"a page (--format html or --open) always shows every table; leave out {name}\n" in capsys.readouterr().err
        )


@pytest.mark.chromium
def test_frame_mixes_few_of_a_million_boxes_at_any_zoom(page: str, tmp_path: Path) -> None:
    """Times would depend on the machine; the boxes and bins that a frame visits do not."""
    probe = """
const size = 1e6, made = { size, shades: new Uint8Array(size), faint: null };
Object.assign(made, { start: new Float64Array(size), duration: new Float64Array(size).fill(60) });
for (let i = 0; i < size; i++) made.start[i] = 100 * i;
const end = 100 * size, columns = 1280, seen = [];
let visited = 0;
const wasPour = pour, wasBins = pourBins;
pour = (...given) => { visited += 1; return wasPour(...given); };
pourBins = (...given) => { visited += (given[4] - given[3]) / given[6]; return wasBins(...given); };
for (let part = 1; part > 1e-5; part /= 1.5) {
  const view = { from: end / 3, to: end / 3 + part * end * 0.66, end };
  mixed(made, view, columns, new Uint8ClampedArray(columns * 4), 0); // the first use of a level makes its bins
  visited = 0;
  const pixels = new Uint8ClampedArray(columns * 4), wide = mixed(made, view, columns, pixels, 0);
  const opacity = pixels.reduce((sum, value, k) => sum + (k % 4 === 3 ? value : 0), 0) / 255 / columns;
  seen.push([Math.round(visited), wide.length, (view.to - view.from) / 100 / columns, opacity]);
}
answer(seen);
"""
    seen = browse(tmp_path, page, probe)
    assert max(visited for visited, *_ in seen) < 60_000
    assert max(wide for _, wide, *_ in seen) <= 1280 / 3 + 2
    many = [opacity for _, _, boxes_of_pixel, opacity in seen if boxes_of_pixel > 5]
    assert many == pytest.approx([0.6] * len(many), abs=0.02)
