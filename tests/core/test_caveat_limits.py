"""Numbers in the texts of caveats, and what a loop that ended early is told."""

from __future__ import annotations

import pytest

from cs_systems.core.caveats import (
    LOOP_REMEDIES,
    REMEDIES,
    beyond,
    broken_graph,
    cut_short,
    not_restored,
    observed,
    recomputed,
    skipped_steps,
)


@pytest.mark.parametrize(
    ("timed", "done", "earlier"),
    [
        (1, 8, "--steps 2:8, or Recorder(warmup=2, steps=6)"),
        (5, 8, "--steps 2:8, or Recorder(warmup=2, steps=6)"),
        (6, 8, None),  # no more steps than were timed
        (1, 100, "--steps 2:100, or Recorder(warmup=2, steps=98)"),
        (2, 7, "--steps 1:7, or Recorder(warmup=1, steps=6)"),
        (3, 4, None),
        (0, 3, None),  # too short for a warm-up
        (0, None, None),
    ],
)
def test_caveat_of_a_short_loop_names_steps_that_fit(timed: int, done: int | None, earlier: str | None) -> None:
    caveat = cut_short(timed, 50, done, "the loop ended")
    after = f" after {done}" if done else ""
    assert caveat.message == f"{timed} of 50 steps were timed, because the loop ended{after}"
    assert caveat.remedy == "let the loop run longer" + (
        f", or time earlier steps: cs-systems run {earlier}" if earlier else ""
    )


def test_remedy_of_a_short_loop_is_in_its_record_alone() -> None:
    assert {*REMEDIES} - {*LOOP_REMEDIES} == {cut_short(1, 50, 8, "the loop ended").code}


@pytest.mark.parametrize("code", ["unstable", "recompiled", "cudaMalloc"])
@pytest.mark.parametrize(
    ("ran", "told"),
    [((5, 20), (20, 50)), ((20, 50), (40, 100)), ((20, 10), (40, 50)), ((5, 50), (20, 100)), ((0, 200), (20, 400))],
)
def test_steps_of_a_remedy_are_more_than_those_that_ran(code: str, ran: tuple[int, int], told: tuple[int, int]) -> None:
    (warmup, steps), remedy = told, beyond(LOOP_REMEDIES[code], *ran, timed=ran[1])
    assert f"cs-systems run --steps {warmup}:{warmup + steps}, or Recorder(warmup={warmup}, steps={steps})" in remedy


def test_remedy_of_a_loop_that_ended_names_no_steps() -> None:
    remedy = beyond(LOOP_REMEDIES["unstable"], 5, 20, timed=19)
    assert remedy == "let the loop run longer, and record more steps after a longer warm-up"
    assert beyond("other", 5, 20, timed=19) == "other"


def test_loop_ended_by_an_error_gets_advice_to_correct_it() -> None:
    caveat = cut_short(1, 50, 8, "the loop ended with ValueError: bad", ["profile by kineto", "memory snapshot"])
    assert caveat.message == (
        "1 of 50 steps were timed, because the loop ended after 8 with ValueError: bad; no profile by kineto and no "
        "memory snapshot was recorded"
    )
    assert caveat.remedy == "correct the error, and record again"


def test_numbers_of_caveats_have_their_units() -> None:
    assert recomputed(0.25).message.startswith("25% of backward repeats forward")
    assert recomputed(1.0).message.startswith("100% of backward repeats forward")
    assert "scale 65,536 at first, 1,000,000 at last" in skipped_steps(1, 9, 65536.0, 1e6).message
    assert "scale 1 at first, 0.5 at last" in skipped_steps(1, 9, 1.0, 0.5).message
    assert "scale 2 at first, 0.5 at last" in skipped_steps(1, 9, 1.75, 0.5).message
    assert "scale 1 at first, 1.70e+38 at last" in skipped_steps(1, 9, 1.0, 1.7e38).message
    assert "(scale 999,999 at first)" in skipped_steps(1, 9, 999999.0, None).message


def test_five_names_of_what_could_not_be_restored_are_shown() -> None:
    assert "changed a, b, c, d, e, and could not" in not_restored([*"abcde"]).message
    assert "changed a, b, c, d, e and 2 more, and could not" in not_restored([*"abcdefg"]).message


def test_first_graph_break_is_named() -> None:
    rows = [{"place": f"a.py:{n}", "reason": f"reason {n}"} for n in (1, 2)]
    assert broken_graph(rows) == "left the graph, first at a.py:1: reason 1"  # type: ignore[arg-type]


def test_loop_has_the_remedies_of_cells_but_for_few_samples() -> None:
    assert {*REMEDIES} - {*LOOP_REMEDIES} == {"few-samples"}


@pytest.mark.parametrize(("own_s", "boundaries", "is_told"), [(0.5, 100, True), (0.499, 100, False), (0.5, 99, False)])
def test_cost_of_finding_phases_is_told_from_a_twentieth_of_the_step(
    own_s: float, boundaries: int, is_told: bool
) -> None:
    found = [*observed(own_s, 10.0, boundaries)]
    assert len(found) == is_told
    for caveat in found:
        assert caveat.message == "finding the phases takes up to 500 ms of the step, which has 100 of their boundaries"
