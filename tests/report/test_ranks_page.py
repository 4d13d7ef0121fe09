"""Tests of the page of several ranks: made traces with known arrivals and real ones, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cs_systems.analysis.attribution.overlap import Intervals
from cs_systems.analysis.comparison import rank_timeline
from cs_systems.analysis.comparison.rank_timeline import TRANSFER, UNKNOWN, WAITING, view
from cs_systems.cli import main
from cs_systems.readers import ranks_of
from cs_systems.report.pages.ranks import render
from tests.analysis.comparison.test_ranks import ARRIVES_US, CLOCK_US, SECOND_US, STEPS, TRANSFER_US, job_of, write
from tests.report.browser import POINTER, Page, browse, data_of, looks

REAL = Path(__file__).parents[1] / "data" / "ranks_h200"
EVIL = "</script><script>document.title = 'ran'</script>"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write(tmp_path_factory.mktemp("ranks"), rank) for rank in ARRIVES_US]


@pytest.fixture(scope="module")
def made(paths: list[Path]) -> rank_timeline.RanksView:
    found = ranks_of(paths, only_if_certain=True)
    assert found
    return view(job_of(found))


def page_of(folder: Path, *files: Path) -> str:
    page = folder / "made.html"
    assert main(["analyze", *map(str, files), "--ranks", "--format", "html", "--output", str(page)]) == 0
    return page.read_text(encoding="utf-8")


def test_waiting_and_transfer_begin_together_on_ranks_whose_clocks_differ(made: rank_timeline.RanksView) -> None:
    last_us = max(ARRIVES_US.values())
    for one in made["ranks"]:
        arrives_us, calls = ARRIVES_US[one["rank"]], one["calls"]
        boxes = [*zip(calls["state"], calls["start"], calls["duration"], strict=True)]
        first = [(state, start / 1e3, duration / 1e3) for state, start, duration in boxes[: 1 + (arrives_us < last_us)]]
        waits = [(WAITING, arrives_us, last_us - arrives_us)] if arrives_us < last_us else []
        assert [box for box, *_ in first] == [box for box, *_ in waits] + [TRANSFER]
        for box, expected in zip(first, [*waits, (TRANSFER, last_us, TRANSFER_US)], strict=True):
            assert box == pytest.approx(expected, abs=0.01)
    assert made["matches"]["last"] == [2] * 2 * STEPS
    assert made["matches"]["transfer"][1] == pytest.approx(SECOND_US * 1e3, abs=20)
    assert made["clocks"].startswith("Clocks are aligned by the ends of 6 collectives. Afterwards the ends of one")


def test_ranks_without_common_collectives_are_placed_by_the_clocks_of_their_hosts() -> None:
    files = {REAL / f"pipeline_rank{rank}.json.gz": rank for rank in (0, 1)}
    job = job_of(files)
    found = view(job)
    assert {state for one in found["ranks"] for state in one["calls"]["state"]} == {UNKNOWN}
    assert found["clocks"] == (
        "No collective connects rank 1 with rank 0: times there are by the hosts' clocks, which may differ."
    )
    began_s = [one.job.began_s or 0.0 for one in job.ranks]
    assert rank_timeline.clocks_ahead(job)[1] == pytest.approx(began_s[0] - began_s[1])
    # Each receive of a stage follows computation of the other one, which sends.
    first, second = (one["compute"] for one in found["ranks"])
    assert abs(first["start"][0] - second["start"][0]) < found["end_ns"] / 10


def test_large_jobs_have_joined_computation_and_the_first_calls(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of({path: rank for rank, path in enumerate(paths)})
    monkeypatch.setattr(rank_timeline, "MOST_SPANS", 9)
    found = view(job)
    assert found["joined_ns"] > 0
    assert sum(len(one["compute"]["start"]) for one in found["ranks"]) <= 9
    monkeypatch.setattr(rank_timeline, "MOST_CALLS", 8)
    found = view(job)
    starts = [start for one in found["ranks"] for start in one["calls"]["start"]]
    assert len(starts) in (8, 9, 10)  # simultaneous calls are not separated
    assert found["steps"]["number"] == [0]
    assert found["hidden_calls"] > 0
    assert f"The timeline ends before {found['hidden_calls']} calls of collectives" in render(found, "ranks", [])
    pauses = Intervals(np.array([0.0, 2.0, 5.0]), np.array([1.0, 3.0, 6.0]))
    assert rank_timeline.joined(pauses, 1.0).start_s.tolist() == [0.0, 5.0]


def test_page_of_ranks_is_self_contained_whatever_their_names_are(tmp_path: Path) -> None:
    files = [write(tmp_path, rank) for rank in range(3)]
    for file in files:
        trace = json.loads(file.read_text())
        trace["host_name"] = EVIL
        for event in trace["traceEvents"]:
            if "Process Group Name" in event["args"]:
                event["args"]["Process Group Name"] = EVIL
        file.write_text(json.dumps(trace))
    page = page_of(tmp_path, *files)
    assert len(data_of(page, "ranks")["ranks"]) == 3
    text = Page(page).text
    assert "Clocks are aligned by the ends of 6 collectives." in text
    assert "Ranks, per step" in text


@pytest.mark.chromium
def test_pinned_collective_is_outlined_on_all_ranks_and_summed_up_by_rank(tmp_path: Path, paths: list[Path]) -> None:
    seen = browse(
        tmp_path,
        page_of(tmp_path, *paths),
        POINTER
        + """
const line = byName("timeline"), answers = {};
answers.buttons = [...byName("families").children].map((one) => one.textContent);
answers.shown = byName("shown").textContent;
answers.hatched = [...byName("families").querySelectorAll("i")].map((one) => one.style.background.includes("gradient"));
const wait = rows.find((row) => row.say.match && palette.names[row.shades[0]] === "waiting");
event(line, "click", timeline.xAt(wait.start[0] + wait.duration[0] / 2), wait.top + 5);
answers.pinned = byName("pinned").innerText;
answers.marked = timeline.marked.map((hit) => hit.rank);
[...byName("pinned").querySelectorAll("button")].find((one) => one.textContent === "rank 2").click();
answers.last = timeline.pinned.row.rank.rank;
timeline.select(0, timeline.end);
answers.sums = [...byName("range").querySelectorAll("tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
byName("families").children[1].click();
answers.found = byName("found").textContent;
byName("search").value = "reduce_scatter";
byName("search").dispatchEvent(new Event("input"));
answers.both = byName("found").textContent;
key(line, "Escape"); key(line, "Escape"); key(line, "Escape");
answers.none = [byName("found").textContent, byName("search").value];
answer(answers);
""",
    )
    assert seen["buttons"] == ["other work, copies", "waiting for other ranks", "transfer"]
    assert seen["shown"].startswith("0 s … ")
    assert seen["hatched"] == [True, True, False]  # as in the timeline
    assert seen["pinned"].startswith("all_reduce, 4.00 MiB, rank 0\n")
    assert seen["marked"] == [0, 0, 1, 1, 2]
    assert seen["last"] == 2
    assert seen["sums"][0] == ["rank", "other work, copies", "waiting for other ranks", "transfer"]
    assert [row[2] for row in seen["sums"][1:]] == ["9.01 ms", "7.80 ms", ""]
    waiting = sum(ARRIVES_US[rank] < max(ARRIVES_US.values()) for rank in CLOCK_US)
    assert seen["found"] == f"{(waiting + 2) * STEPS} boxes"  # ranks 0 and 1 also wait 2 and 1 µs for the other call
    assert seen["both"] == f"{2 * STEPS} boxes"
    assert seen["none"] == ["", ""]


@pytest.mark.chromium
def test_page_of_ranks_fits_screen_phone_and_paper(tmp_path: Path) -> None:
    looks(tmp_path, page_of(tmp_path, *(REAL / f"late_data_rank{rank}.json.gz" for rank in (0, 1))))
