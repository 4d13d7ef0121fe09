"""Lines that a loop's slow steps are named after, from samples of the stack."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

import pytest

from cs_systems.analysis.comparison.loop_findings import CALLS
from cs_systems.core.step_kinds import StepKind
from cs_systems.measure.recorder.batches import ModelCalls
from cs_systems.measure.recorder.lines import (
    Usual,
    common_line,
    lines_of,
    makes_order,
    own_python,
    places_of,
    slow_steps,
)
from cs_systems.measure.recorder.stacks import Line, Sample, is_own, line_of

PROGRAM = """
def main():
    play()
    play()
    play()
    update()
def play():
    pass
def update():
    pass
    pass
"""


def codes() -> dict[str, CodeType]:
    """Return the code of each function of the program."""
    module = compile(PROGRAM, "loop.py", "exec")
    return {each.co_name: each for each in module.co_consts if isinstance(each, CodeType)}


def line(code: CodeType, number: int) -> Line:
    """Return the first instruction of a line of the program."""
    return code, next(at for at in range(0, len(code.co_code), 2) if line_of((code, at)) == number)


def spread(main: CodeType, update: CodeType, play: CodeType) -> dict[tuple[Line, ...], float]:
    return {(line(main, 3),): 2, (line(main, 4),): 2, (line(main, 5),): 2, (line(main, 6), line(update, 10)): 4}


def in_one_line(main: CodeType, update: CodeType, play: CodeType) -> dict[tuple[Line, ...], float]:
    return {(line(main, 3), line(play, 8)): 7, (line(main, 6), line(update, 10)): 3}


def in_one_function(main: CodeType, update: CodeType, play: CodeType) -> dict[tuple[Line, ...], float]:
    return {(line(main, 6), line(update, 10)): 4, (line(main, 6), line(update, 11)): 4, (line(main, 3),): 2}


def in_update(main: CodeType, update: CodeType, play: CodeType) -> dict[tuple[Line, ...], float]:
    return {(line(main, 6), line(update, 11)): 9, (line(main, 3),): 1}


@pytest.mark.parametrize(
    ("times", "updates", "expected"),
    [
        (spread, True, None),
        (spread, False, (6, 1.0)),
        (in_one_line, True, (8, 0.7)),
        (in_one_function, False, (10, 0.8)),
        (in_one_function, True, None),
        (in_update, True, (11, 0.9)),
    ],
)
def test_slow_steps_are_named_after_a_line_with_most_of_the_time_or_a_function_that_does_not_train(
    times: Callable[..., dict[tuple[Line, ...], float]], updates: bool, expected: tuple[int, float] | None
) -> None:
    known = codes()
    main, update = known["main"], known["update"]
    samples = [
        Sample(0, None, chain, chain[-1], time_s) for chain, time_s in times(main, update, known["play"]).items()
    ]
    updating = [(line(main, 6), line(update, 10)), (line(main, 6), line(update, 11))]
    found, share = common_line(samples, updating if updates else ())
    assert (found and (line_of(found), share)) == expected


class In(NamedTuple):
    """Phase of a sample."""

    name: str

    def phase(self) -> str:
        return self.name


@pytest.mark.parametrize(("phase", "function"), [("forward", CALLS), ("loss", "play")])
def test_a_line_that_also_runs_after_the_last_forward_is_no_call_of_a_phase(phase: str, function: str) -> None:
    """The last of several calls of an own function comes after the last forward, and counts to the loss."""
    found = codes()
    chain = line(found["main"], 3), line(found["play"], 8)
    samples = [Sample(0, In(name), chain, None, 0.01) for name in ("other", "other", "other", phase)]
    rows = own_python(samples, {"other": 0.03, phase: 0.01}, lambda chain: False)
    assert [row["function"] for row in rows if row["phase"] == "other"] == [function]


@pytest.mark.parametrize(("is_known", "function"), [(True, CALLS), (False, "main")])
def test_call_of_a_small_model_without_a_sample_inside_is_a_call_of_a_phase(is_known: bool, function: str) -> None:
    """The model takes less time than lies between two samples, which fall into the code around its call."""
    main, calls = codes()["main"], ModelCalls()
    chain = (line(main, 3),)
    if is_known:
        calls.add(chain, has_gradients=True)
    samples = [Sample(0, In("other"), chain, None, 0.01) for _ in range(3)]
    rows = own_python(samples, {"other": 0.03}, lambda chain: False, calls_phase=calls.are_made_by)
    assert [row["function"] for row in rows] == [function]


@pytest.mark.parametrize(("timed_s", "time_s"), [(0.08, 0.08), (0.1, 0.09)])
def test_calls_of_phases_do_not_explain_time_that_samples_did_not_see(timed_s: float, time_s: float) -> None:
    """The timed steps may wait there for something else, such as another thread."""
    chain = (line(codes()["main"], 3),)
    samples = [Sample(step, In(name), chain, None, 0.03) for step in (0, 1) for name in ("other", "forward")]
    rows = own_python(samples, {"other": timed_s, "forward": 0.03}, lambda chain: False)
    assert [row["time_s"] for row in rows if row["function"] == CALLS] == [pytest.approx(time_s)]


@pytest.mark.parametrize(
    ("plays_s", "updates_s", "usual_s", "expected"),
    [
        (0.0, 4.0, 1.0, ("main", True)),  # each line takes four times as long, as on a busy machine
        (3.0, 1.0, 1.0, ("play", False)),
        (0.0, 4.0, 0.5, ("main", True)),
        (0.0, 4.0, 0.49, ("main", False)),
    ],
)
def test_slow_steps_that_do_what_usual_ones_do_are_told_apart(
    plays_s: float, updates_s: float, usual_s: float, expected: tuple[str, bool]
) -> None:
    found = codes()
    plays, updates = (line(found["main"], 3), line(found["play"], 8)), (line(found["main"], 6),)
    often = [Sample(n, None, updates, None, usual_s) for n in range(4)]
    times = (plays, plays_s), (updates, updates_s)
    slow = [Sample(9, None, chain, None, time_s) for chain, time_s in times if time_s]
    usual = Usual(1.0, {}, lines_of(often, 4), places_of(often, 4))
    kind = StepKind((9,), plays_s + updates_s, plays_s + updates_s, None)
    row = slow_steps(kind, usual, [1.0] * 9 + [plays_s + updates_s], slow, lambda _: True)
    assert (row["function"], row["as_usual"]) == expected


@pytest.mark.parametrize("phase", ["other", "forward"])
def test_lines_outside_of_the_phases_from_which_the_loss_is_computed_are_marked(phase: str) -> None:
    chain = line(codes()["main"], 3), line(codes()["play"], 8)
    samples = [Sample(0, In(phase), chain, None, 0.01) for _ in range(3)]
    asked: list[tuple[Line, ...]] = []

    def goes_into_loss(lines: tuple[Line, ...]) -> bool:
        asked.append(lines)
        return True

    (row,) = own_python(samples, {phase: 0.03}, lambda chain: False, goes_into_loss)
    assert row.get("feeds_loss", False) is (phase == "other")
    assert [*dict.fromkeys(asked)] == [chain] * (phase == "other")
    (row,) = own_python(samples, {phase: 0.03}, lambda chain: False)
    assert "feeds_loss" not in row


def test_program_below_the_prefix_of_python_is_own() -> None:
    assert is_own(f"{sys.prefix}/src/app/train.py")
    assert not is_own(f"{sysconfig.get_path('purelib')}/library/train.py")


@pytest.mark.parametrize(
    ("function", "source", "expected"),
    [
        ("Buckets.__iter__", "order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)", True),
        ("Buckets.__iter__", "for n in torch.randperm(self.count).tolist():", True),
        ("Buckets.__iter__", "return iter([n for n in order if n < self.count])", True),
        ("Endless.__iter__", "for batch in self.loader:", False),
        ("Endless.__iter__", "yield from self.loader", False),
        ("Endless.__iter__", "batch = next(self.batches)", False),
        ("main", "for x in data:", False),
        (None, "trainer.fit(model)", False),
    ],
)
def test_order_of_a_sampler_is_made_by_its_iterator(function: str | None, source: str, expected: bool) -> None:
    assert makes_order(function, source) is expected
