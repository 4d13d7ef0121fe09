"""Page of a run, in headless Chromium: content, sorting, filtering, widths and colours."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from cs_systems.config import Mode, RunConfig, preset
from cs_systems.record import Origin, RunRecord
from cs_systems.report.figures import plot
from cs_systems.report.pages import records as html
from cs_systems.report.pages.tables import sections
from cs_systems.report.tables.table import Table
from scripts.benchmarks._browser import Tab
from tests.report.browser import Page, browse, looks, opened
from tests.report.conftest import Build, attention_config

# Sorts and filters the table as a user would, and answers with the rows shown.
PROBE = """
const order = () => [...document.querySelectorAll("#results-0 tbody tr")].filter((row) => !row.hidden)
  .map((row) => [...row.cells].map((cell) => cell.textContent));
const heads = [...document.querySelectorAll("#results-0 th")];
const step = heads.find((head) => head.textContent.startsWith("step"));
const seen = { addressed: order(), width: document.documentElement.scrollWidth, room: innerWidth };
step.querySelector("button").click();
seen.ascending = order();
seen.sort = step.getAttribute("aria-sort");
step.querySelector("button").click();
seen.descending = order();
seen.sorts = heads.map((head) => head.getAttribute("aria-sort"));
const filter = document.querySelector("input[data-filters=results-0]");
filter.value = "medium FLASH";
filter.dispatchEvent(new Event("input"));
seen.filtered = order();
answer(seen);
"""


@pytest.fixture(scope="module")
def page(train_records: list[RunRecord], attention_records: list[RunRecord]) -> str:
    made = Origin(1_795_000_000.5, "cs-systems time --size small", "gpu-7")
    later = replace(made, recorded_unix_s=made.recorded_unix_s + 700)
    return html.render(
        [*(replace(r, origin=made) for r in train_records), *(replace(r, origin=later) for r in attention_records)]
    )


def test_page_is_self_contained(page: str) -> None:
    for tag, attributes in Page(page).tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster"):
                assert value is not None
                assert value.startswith("#"), (tag, name, value)
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)


def test_page_ids_are_unique(page: str) -> None:
    tags = Page(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_html_in_records_is_escaped(broken_records: list[RunRecord]) -> None:
    origin = Origin(0.0, "cs-systems time --out '<script>evil()</script>'\x1b[31m", "<b>")
    read = Page(html.render([replace(record, origin=origin) for record in broken_records]))
    assert sum(tag == "script" for tag, _ in read.tags) == 1
    assert "<script>alert(1)</script>" in read.text
    assert "<script>evil()</script>" in read.text
    assert "\x1b" not in read.text


def test_page_states_device_versions_caveats_and_origin(page: str) -> None:
    text = Page(page).text
    for expected in (
        "train_step and attention on NVIDIA H200",
        "2.11.0+cu130",
        "use a larger batch, --compile or CUDA graphs",
        "large ctx 1024 batch 4 · naive · fp32 · train-step",
        "tried to allocate 3.91 GiB for the scores",
        "cs-systems time --size small",
        "recorded2026-11-18 11:06 to 11:18 UTC",
        "hostgpu-7",
        "temperature47.0 °C",
        "cs_systems0.1.0",
        '"context_length": 1024',
    ):
        assert expected in text


@pytest.mark.chromium
def test_page_sorts_and_filters_table(page: str, tmp_path: Path) -> None:
    seen = browse(tmp_path, page, PROBE, "#sort=results-0,3,descending")
    rows = {name: seen[name] for name in ("addressed", "ascending", "descending", "filtered")}
    steps = {name: [row[7] for row in found] for name, found in rows.items()}
    assert [row[3] for row in rows["addressed"]] == ["sdpa_flash"] * 6 + ["naive"] * 6
    numbers = [float(cell) for cell in steps["ascending"][:-1]]
    assert numbers == sorted(numbers)
    assert steps["ascending"][-1] == "–"
    assert steps["descending"] == [*steps["ascending"][-2::-1], "–"]
    assert (seen["sort"], seen["sorts"].count("descending")) == ("ascending", 1)
    assert [row[1:4] for row in rows["filtered"]] == [
        ["medium", "1024", "sdpa_flash"],
        ["medium", "256", "sdpa_flash"],
    ]


def test_headings_begin_with_a_capital_letter_unless_with_a_name() -> None:
    shown = Page(sections([Table(caption, (), (), ()) for caption in ("steps: of", "train_step on", "aten::mm")])).text
    assert [heading in shown for heading in ("Steps: of", "train_step on", "aten::mm")] == [True] * 3


def test_only_long_tables_have_a_field_to_filter_them(train_records: list[RunRecord]) -> None:
    texts = [html.render(train_records[:most]) for most in (10, 12)]
    assert ['data-filters="results-0"' in text for text in texts] == [False, True]


@pytest.mark.chromium
def test_notes_wrap_and_options_do_not(page: str, tmp_path: Path) -> None:
    """At 1280 px no note of a caveat is cut, and at 400 px no option breaks after its dashes."""
    probe = """
    const box = document.querySelector("#results-0").parentElement;
    const options = [...document.querySelectorAll(".option")];
    answer({ over: box.scrollWidth - box.clientWidth, options: options.map((each) => each.getClientRects().length),
             texts: options.map((each) => each.textContent), step: "" });
    """
    wide, narrow = browse(tmp_path, page, probe), browse(tmp_path, page, probe, width=400)
    assert wide["over"] <= 0
    assert {*narrow["options"]} == {1}
    assert "--compile" in narrow["texts"]


@pytest.mark.chromium
def test_note_stays_whole_at_the_left_edge_of_a_scrolled_table(page: str, tmp_path: Path) -> None:
    probe = """
    const box = document.querySelector("#results-0").parentElement, edge = (one) => one.getBoundingClientRect();
    box.scrollLeft = 300;
    const notes = [...box.querySelectorAll("[data-column=note]")];
    const cut = notes.filter((one) => one.scrollWidth > one.clientWidth || edge(one).right > edge(box).right).length;
    answer({ scrolled: box.scrollLeft, left: notes.map((one) => edge(one).left - edge(box).left), cut });
    """
    seen = browse(tmp_path, page, probe, width=390)
    assert seen["scrolled"] == 300
    assert {round(left) for left in seen["left"]} == {0}
    assert seen["cut"] == 0


@pytest.mark.chromium
def test_contents_lead_to_the_sections_and_stay_in_view(page: str, tmp_path: Path) -> None:
    with opened(tmp_path, page, "#section-reproduce") as tab:
        assert tab.evaluate("scrollY > 500 && document.querySelector('.contents').getBoundingClientRect().top < 50")
        tab.evaluate("document.querySelector('.contents').open = true")
        links = "[...document.querySelectorAll('.contents a')]"
        assert tab.evaluate(f"{links}.map((one) => one.textContent)")[-2:] == ["Environment", "Reproduce"]
        assert tab.evaluate(f"{links}.every((one) => document.querySelector(one.hash).tagName === 'H2')")
        tab.evaluate(f"{links}[0].click()")
        assert not tab.evaluate("document.querySelector('.contents').open")
        assert tab.evaluate("document.querySelector(location.hash).getBoundingClientRect().top") > 0


@pytest.mark.chromium
def test_page_fits_width_of_phone(page: str, tmp_path: Path) -> None:
    seen = browse(tmp_path, page, PROBE, width=390)
    assert seen["room"] == 390
    assert seen["width"] <= 390


@pytest.mark.chromium
@pytest.mark.parametrize("view", [{}, {"dark": True}], ids=["light", "dark"])
@pytest.mark.parametrize("box", ["#results-0", "figure svg"])
def test_shadow_shows_on_which_side_a_wide_table_continues(
    page: str, tmp_path: Path, box: str, view: dict[str, bool]
) -> None:
    """At 400 px a table and a figure are wider than the page: a shadow shows on which side there is more."""
    with opened(tmp_path, page, width=400, **view) as tab:
        tab.evaluate(f"window.box = document.querySelector('{box}').closest('.scroll'); box.scrollIntoView()")
        assert tab.evaluate("box.scrollWidth > box.clientWidth")
        has_note = tab.evaluate("box.querySelector('td[data-column=note]') !== null")  # it covers the left shadow
        for scrolled, (left, right) in ((0, (False, True)), (0.5, (True, True)), (1, (True, False))):
            tab.evaluate(
                f"box.style.background = ''; box.scrollLeft = {scrolled} * (box.scrollWidth - box.clientWidth)"
            )
            seen = edges(tab, tmp_path)
            tab.evaluate("box.style.background = 'none'")
            plain = edges(tab, tmp_path)
            assert [a != b for a, b in zip(seen, plain, strict=True)] == [left and not has_note, right]


def edges(tab: Tab, folder: Path) -> tuple[bytes, bytes]:
    """Return the pixels of the first and of the last column of `box`."""
    tab.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    sides = "(({left, top, right, bottom}) => [left, top, right, bottom].map(Math.round))(box.getBoundingClientRect())"
    left, top, right, bottom = tab.evaluate(sides)
    tab.screenshot(folder / "seen.png")
    pixels = imread(folder / "seen.png")[top + 1 : bottom - 1]
    return pixels[:, left].tobytes(), pixels[:, right - 1].tobytes()


@pytest.mark.chromium
def test_page_is_legible_in_light_dark_phone_print_and_forced_colours(page: str, tmp_path: Path) -> None:
    looks(tmp_path, page)


@pytest.mark.chromium
def test_table_is_sorted_and_filtered_by_keyboard(page: str, tmp_path: Path) -> None:
    with opened(tmp_path, page) as tab:
        tab.press("/", *"medium")
        assert tab.evaluate("[...document.querySelectorAll('tbody tr')].some((row) => row.hidden)")
        tab.press("Tab", "Tab")
        assert tab.evaluate("document.activeElement.closest('th') !== null")
        tab.press("Enter")
        assert tab.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of a page out: to draw them takes ten times as long as the rest."""
    monkeypatch.setattr(plot, "svgs", lambda records, prefix="": {})


@pytest.mark.usefixtures("without_figures")
def test_profiled_records_have_own_section_and_are_not_in_headline(build: Build) -> None:
    clean = build(RunConfig(), 0.02, 1e12, 10**9)
    page = html.render([build(RunConfig(profiler="nsys"), 0.001, 1e12, 10**9), clean])
    assert ">train_step</h2>" in page
    assert ">train_step under nsys</h2>" in page
    assert "<h1>train_step on NVIDIA H200</h1>" in page
    (fact,) = re.findall(r"<dt>tokens/s</dt><dd>([\d,]+)", page)
    assert int(fact.replace(",", "")) == pytest.approx(4 * 512 / 0.02, rel=0.05)
    alone = html.render([build(RunConfig(profiler="nsys"), 0.001, 1e12, 10**9)])
    assert "tokens/s</dt>" not in alone, "a profiled step is no timing"
    assert "<h1>train_step under nsys on NVIDIA H200</h1>" in alone


@pytest.mark.usefixtures("without_figures")
def test_headline_has_no_highest_value_where_only_one_cell_has_one(build: Build) -> None:
    """PyTorch counts FLOPs in one process only, so that no strategy has a rate to compare with that of `single`."""
    records = [
        build(RunConfig(strategy="ddp_flat", world_size=2), 0.02, 1e12, 10**9),
        build(RunConfig(), 0.03, 1e12, 1),
    ]
    without = [{**row, "model_flops": None} for row in records[0].results["cost"]]
    page = html.render([replace(records[0], results={**records[0].results, "cost": without}), records[1]])
    assert "<dt>highest tokens/s</dt>" in page
    assert "model FLOP/s</dt>" not in page
    assert "<dt>highest model FLOP/s</dt>" in html.render(records)


@pytest.mark.usefixtures("without_figures")
def test_headline_compares_no_shares_of_different_peaks(build: Build) -> None:
    records = [build(RunConfig(batch_size=n), 0.02 * n, 1e12, 10**9) for n in (1, 2)]
    assert "<dt>highest MFU</dt>" in html.render(records)
    peak = {**records[1].results["ceiling"][0], "peak_flops_per_s": 9e14}
    other = replace(records[1], results={**records[1].results, "ceiling": [peak]})
    page = html.render([records[0], other])
    assert "<dt>highest MFU</dt>" not in page
    assert "<dt>highest model FLOP/s</dt>" in page


@pytest.mark.usefixtures("without_figures")
def test_headline_names_its_cell_and_takes_whole_steps_of_the_largest_model(build: Build) -> None:
    records = [
        build(RunConfig(model=preset(size), mode=mode), seconds, 1e12, 10**9)
        for size, seconds in (("tiny", 0.001), ("medium", 0.1))
        for mode in (Mode.FORWARD, Mode.TRAIN_STEP)
    ]
    page = html.render(records)
    (fact,) = re.findall(r"<dt>tokens/s of medium</dt><dd>([^<]+)</dd>", page)
    count, _, cell = fact.partition(" · ")
    assert cell.split(" · ")[0] == "medium"
    assert int(count.replace(",", "")) == pytest.approx(4 * 512 / 0.1, rel=0.05)


@pytest.mark.usefixtures("without_figures")
def test_headline_of_a_users_own_model_has_the_highest_throughput(build: Build) -> None:
    """A model of the user's has no size, by which the cells of the largest model are chosen."""
    records = [build(RunConfig(batch_size=n), 0.02 * n, 1e12, 10**9) for n in (1, 2)]
    own = [replace(r, config={**r.config, "workload": "mine.py:model"}) for r in records]
    ran = [{**own[0].results["ran"][0], "tokens": 2048, "uses": "batch_size"}]
    page = html.render([replace(r, results={**r.results, "ran": ran}) for r in own])
    assert re.search(r"<dt>highest tokens/s</dt><dd>[\d,]+ · batch 1</dd>", page)


@pytest.mark.usefixtures("without_figures")
def test_headline_names_a_cell_among_those_of_its_own_workload(build: Build) -> None:
    """Cells of another workload differ in every field, which says nothing about the best cell."""
    strategies = ("ddp_flat", "ddp_naive")
    records = [build(RunConfig(strategy=name, world_size=2), 0.02, 1e12, 10**9) for name in strategies]
    page = html.render([*records, build(attention_config("naive", 1024), 0.001, 1e9, 10**6)])
    (fact,) = re.findall(r"<dt>highest tokens/s</dt><dd>([^<]+)</dd>", page)
    assert fact.partition(" · ")[2] in strategies
