"""Numbers that all rules share: shares and their order, plans, measured expectations, and evidence of traces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.analysis.diagnosis import Answer, Diagnosis, apply_rules
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._findings import ranked
from cs_systems.analysis.diagnosis._measured import after, timed_cells, with_measured, with_part
from cs_systems.analysis.diagnosis._plan import planned
from cs_systems.analysis.diagnosis._together import together
from cs_systems.analysis.replay import Change, FamilyScaled, HostScaled, LaunchesFree, Refusal
from cs_systems.analysis.replay import Expected as Predicted
from cs_systems.config import RunConfig
from cs_systems.readers.forms.trace import Step
from cs_systems.record import Measurement, RunRecord, Sample
from tests.analysis.attribution.test_gaps import trace
from tests.analysis.diagnosis.test_rules import experiment, measured, timed, with_experiments, with_tables


def cause(code: str, share: float, **known: Any) -> Diagnosis:
    return Diagnosis("cause", "remedy", 1.0, takes=share, code=code, **known)


def order(*found: Diagnosis) -> list[str]:
    return [one.code for one in ranked(found)]


@pytest.mark.parametrize(("takes", "share"), [(-1.0, 0.0), (0.25, 0.25), (3.0, 1.0)])
def test_share_is_between_0_and_1(takes: float, share: float) -> None:
    assert Diagnosis("", "", 1.0, takes=takes).share == share
    assert Diagnosis("", "", -1.0, takes=takes).share == 0.0


def test_row_has_numbers_in_the_unit_of_its_diagnosis_alone() -> None:
    rows = [one.row() for one in (Diagnosis("", "", 1.0, 0.5), Diagnosis("", "", 8, 2, "bytes"))]
    names = ("now_s", "at_best_s", "now_bytes", "at_best_bytes")
    assert [{name: row[name] for name in names if name in row} for row in rows] == [  # type: ignore[literal-required]
        {"now_s": 1.0, "at_best_s": 0.5}, {"now_bytes": 8, "at_best_bytes": 2},
    ]  # fmt: skip


def test_causes_are_ordered_by_their_share_of_the_loop() -> None:
    assert order(cause("a", 0.5), cause("b", 0.75, weight=1.0)) == ["b", "a"]
    assert order(cause("a", 0.5), cause("b", 0.75, weight=0.5)) == ["a", "b"]
    assert order(cause("a", 0.75, then="then"), cause("b", 0.5)) == ["b", "a"]
    assert order(cause("a", 0.75, comes_last=True), cause("b", 0.1), cause("c", 0.0999)) == ["b", "a", "c"]


@pytest.mark.parametrize(("share", "is_first"), [(0.25, True), (0.2499, False)])
def test_cause_that_explains_half_of_another_comes_before_it(share: float, is_first: bool) -> None:
    found = order(cause("general", 0.5), cause("special", share, refines=("general",)))
    assert (found[0] == "special") is is_first


@pytest.mark.parametrize(("share", "is_first"), [(0.1, True), (0.0999, False)])
def test_free_remedy_comes_before_a_costly_one_from_a_tenth_on(share: float, is_first: bool) -> None:
    found = order(cause("costly", 0.5), cause("free", share, precedes=("costly",)))
    assert (found[0] == "free") is is_first


def test_cause_found_on_several_ranks_shows_the_largest() -> None:
    small, large = cause("leak", 0.5), replace(cause("leak", 0.25), now=2.0)
    answers = {"rank 0": Answer((small,), ("what",), "the peak"), "rank 1": Answer((large, cause("other", 0.5)))}
    found = together(answers, "ranks")
    assert [(one.code, one.cells, one.now) for one in found.diagnoses] == [
        ("other", "rank 1 alone", 1.0), ("leak", "rank 1; 2 of 2 ranks have this cause", 2.0),
    ]  # fmt: skip
    assert (found.unknowns, found.judged) == (("what (rank 0)",), "the peak of any of the 2 ranks")
    assert together({"rank 0": Answer()}, "ranks").judged == ""


# plans


@dataclass(frozen=True)
class Recorded:
    """Replay of a step of 1 s in which each change saves a given time, and a few changes together are refused."""

    saves: dict[Change, float | None]
    step_s: float = 1.25

    def what_if(self, *changes: Change) -> Predicted | Refusal:
        saved = [self.saves[change] for change in changes]
        if None in saved:
            return Refusal("cannot be told")
        value = 1.0 - sum(each or 0.0 for each in saved)
        return Predicted(value, value - 0.125, value + 0.125, 1.0, is_estimated=True)


LAUNCHES, HOST, MATMUL, COPY = LaunchesFree(), HostScaled(0.5), FamilyScaled("matmul", 0.5), FamilyScaled("copy", 0.5)


def plan(saves: dict[Change, float | None], busy_s: float = 0.0, **takes: float) -> list[tuple[str, float | None]]:
    changes: dict[str, Change] = {"launches": LAUNCHES, "host": HOST, "matmul": MATMUL, "copy": COPY}
    found = [cause(code, share, change=changes.get(code)) for code, share in takes.items()]
    told = planned(found, Recorded(saves), busy_s)  # type: ignore[arg-type]
    return [(one.code, one.expected.value if one.expected else None) for one in told]


@pytest.mark.parametrize(
    ("saves", "busy_s", "takes", "expected"),
    [
        # A remedy of one cause that saves 0.8 times as much comes before a graph and before what saves less.
        ({LAUNCHES: 0.5, HOST: 0.4}, 0.0, {"launches": 0.5, "host": 0.5}, [("host", 0.6), ("launches", 0.1)]),
        ({HOST: 0.25, MATMUL: 0.2, COPY: 0.1875}, 0.0, {"copy": 0.5, "matmul": 0.5, "host": 0.5},
         [("host", 0.75), ("matmul", 0.55), ("copy", 0.3625)]),
        ({HOST: 0.25, LAUNCHES: 0.5}, 0.0, {"launches": 0.5, "host": 0.5}, [("launches", 0.5), ("host", 0.25)]),
        # What saves less than a twentieth, alone or on top of others, is left out; what is refused stays.
        ({HOST: 0.05}, 0.0, {"host": 0.5, "other": 0.5, "small": 0.0499}, [("host", 0.95), ("other", None)]),
        ({HOST: 0.0499}, 0.0, {"host": 0.5}, []),
        ({HOST: None}, 0.0, {"host": 0.5}, [("host", None)]),
        # More than twice what the cause takes, or less than half of the kernels' time, is not believed.
        ({HOST: 0.5}, 0.0, {"host": 0.25}, [("host", 0.5)]),
        ({HOST: 0.5}, 0.0, {"host": 0.249}, [("host", None)]),
        ({HOST: 0.5}, 1.0, {"host": 0.25}, [("host", 0.5)]),
        ({HOST: 0.5}, 1.01, {"host": 0.25}, [("host", None)]),
    ],
)  # fmt: skip
def test_plan_has_the_remedies_that_a_replay_expects_to_gain(
    saves: dict[Change, float | None], busy_s: float, takes: dict[str, float], expected: list[tuple[str, float | None]]
) -> None:
    assert plan(saves, busy_s, **takes) == [(code, value and pytest.approx(value)) for code, value in expected]


@pytest.mark.parametrize(("busy_s", "low"), [(0.0, 0.375), (0.8, 0.4), (0.9, 0.45)])
def test_range_of_a_replay_does_not_begin_below_half_of_the_kernels(busy_s: float, low: float) -> None:
    """A host that varied much leaves a wide range, but no step is shorter than its kernels on all streams."""
    (told,) = planned([cause("host", 0.5, change=HOST)], Recorded({HOST: 0.5}), busy_s)  # type: ignore[arg-type]
    assert told.expected is not None
    assert (told.expected.low, told.expected.value) == (pytest.approx(low), 0.5)


def test_step_of_a_plan_begins_where_the_one_before_ends() -> None:
    found = [cause("host", 0.5, change=HOST, at_best=0.5), cause("matmul", 0.5, change=MATMUL)]
    first, second = planned(found, Recorded({HOST: 0.5, MATMUL: 0.0625}))  # type: ignore[arg-type]
    assert (first.now, first.recorded, first.then, first.at_best) == (1.0, 1.25, "", None)
    assert (second.now, second.recorded, second.then) == (0.5, None, "then, on top of that")
    assert second.expected is not None
    assert (second.expected.low, second.expected.value, second.expected.high) == (0.3125, 0.4375, 0.5625)
    assert first.expected is not None
    assert first.expected.low == 0.375


# measured


def cell(walls: Sequence[float], rounds: int = 1, outcome: str = "ok", **config: Any) -> RunRecord:
    samples = tuple(Sample(n % rounds, False, s, {}, {}) for n, s in enumerate(walls))
    made = RunConfig(**config).to_dict()
    return RunRecord("key", made, outcome, measurement=Measurement("cuda_event", samples, 0.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("then_s", "is_gain"), [(0.98, True), (0.981, False)])
def test_remedy_that_saves_a_fiftieth_gains(then_s: float, is_gain: bool) -> None:
    timed_ = timed_cells(
        [cell([1.0]), cell([then_s], compile="default"), cell([0.5], outcome="failed", precision="bf16")]
    )
    assert len(timed_) == 2
    told = with_measured(replace(cause("a", 0.5), options={"compile": ["default"]}), RunConfig(), timed_)
    assert isinstance(told, Diagnosis) is is_gain
    if isinstance(told, Diagnosis):
        assert told.share == pytest.approx(0.02)
    else:
        assert told.endswith("was measured: 981 ms instead of 1.00 s, no gain")


def test_range_of_a_measured_remedy_spans_its_rounds() -> None:
    rounds = [cell([0.5, 0.3, 0.7, 0.2, 0.6, 0.4], 2, compile="default"), cell([0.8, 0.45], compile="default")]
    told = with_measured(
        replace(cause("a", 0.5), options={"compile": ["default"]}), RunConfig(), timed_cells([cell([1.0]), *rounds])
    )
    assert isinstance(told, Diagnosis)
    assert told.expected is not None
    assert (told.expected.low, told.expected.high) == (0.3, 0.8)


def test_experiment_with_the_rest_of_the_step_has_its_range() -> None:
    evidence = with_experiments(with_tables(), experiment("products", 0.05, baseline_s=0.08))
    part = with_part(evidence, "products")
    assert part is not None
    assert (part.low, part.value, part.high) == pytest.approx((0.065, 0.07, 0.075))
    whole = after(evidence, "products", beside_s=0.01)
    assert whole is not None
    assert (whole.low, whole.value, whole.high) == pytest.approx((0.055, 0.06, 0.065))
    assert with_part(with_experiments(with_tables(), experiment("products", 0.05, baseline_s=0.1)), "products")


# evidence


def recorded(runs: Sequence[tuple[float, float, float]] = (), calls: Sequence[Any] = (), **known: Any) -> Usual:
    """Return a usual step of 10 s that is told to take 1 s, from (start, end, end of the launch) of its kernels."""
    made = trace([*runs] or [(0.5, 1.0, 0.25)], [], [*calls], [])
    made = replace(made, profiler=known.pop("profiler", "nsys"))
    of_step = replace(profile(made), steps=(Step("step", 0.0, 10.0),))
    return Usual(of_step, known.pop("step_s", 1.0), **known)


@pytest.mark.parametrize(
    ("profiler", "gaps", "expected"),
    [
        ("kineto", {"launch-bound": 0.9}, (1 / 3.6, 1 / 1.5)),
        ("nsys", {"launch-bound": 0.9}, (1 / 1.6, 1 / 1.2)),
        ("nsys", {"launch-bound": 0.25, "copy": 0.5}, (1 - 0.5 * (1 - 1 / 1.6), 1 - 0.5 * (1 - 1 / 1.2))),
        ("nsys", {"launch-bound": 0.125, "copy": 0.5}, (0.875, 1 - 0.5 * (1 - 1 / 1.2))),
        ("nsys", {"copy": 0.5}, (1.0, 1.0)),
        ("rocprofv3", {"launch-bound": 0.9}, None),
    ],
)
def test_step_without_the_profiler_is_shorter_by_the_slowdown_of_launches(
    profiler: str, gaps: dict[str, float], expected: tuple[float, float] | None
) -> None:
    rows: Any = [{"device": 0, "cause": name, "time_s": time_s} for name, time_s in gaps.items()]
    found = Evidence({"gaps": rows}, usual=recorded(profiler=profiler)).unprofiled_s
    assert found == (expected and pytest.approx(expected))


def test_busy_time_is_the_step_without_its_gaps() -> None:
    steps: Any = {"steps": [{"device": 0, "wall_s": 1.0}]}
    gaps: Any = {"gaps": [{"device": 0, "cause": "profiler", "time_s": 0.25}]}
    assert Evidence(steps).busy_s == 1.0
    assert Evidence({**steps, **gaps}).busy_s == 0.75
    assert Evidence(gaps, usual=recorded()).busy_s == 0.75
    assert Evidence(gaps, usual=recorded(step_s=0.125)).busy_s == 0.0
    assert Evidence({"overlap": [{"step_s": 1.0}]}).busy_s is None  # type: ignore[dict-item, list-item, typeddict-item]


@pytest.mark.parametrize(("time_s", "is_bound"), [(0.3, False), (0.301, True)])
def test_step_is_host_bound_above_three_tenths(time_s: float, is_bound: bool) -> None:
    tables: Any = {"gaps": [{"device": 0, "cause": "host", "time_s": time_s}], "steps": [{"device": 0, "wall_s": 1.0}]}
    assert Evidence(tables).is_host_bound is is_bound


def test_launch_bound_share_is_of_the_phases_that_end_with_their_launches() -> None:
    assert timed(measurement=measured(lag=0.01)).launch_bound_share == pytest.approx(1.0)
    assert timed(measurement=measured(lag=0.5)).launch_bound_share == 0.0
    assert timed(measurement=Measurement("cuda_event", (), 0.0)).launch_bound_share == 0.0


def test_share_of_usual_steps_is_the_rest_after_slow_steps() -> None:
    start_up, slow = Apart("start-up", (0,), 5.0, 1.0), Apart("slow", (3, 4), 2.0, 1.0)
    usual = recorded(apart=(start_up, slow), total_s=8.0)
    assert Evidence(usual=usual).usual_share == 0.75
    assert Evidence(usual=replace(usual, total_s=1.0)).usual_share == 0.0
    rows: Any = [{"extra_s": 1.0, "total_s": 4.0}, {"extra_s": 1.0, "total_s": 0.0}]
    assert Evidence({"slow_steps": rows}).usual_share == 0.75
    assert Evidence({"slow_steps": [rows[0] | {"extra_s": 9.0}]}).usual_share == 0.0


@pytest.mark.parametrize(("count", "share"), [(20, 0.25), (19, 0.0)])
def test_launches_that_last_until_their_kernels_end_are_counted_from_20_kernels_on(count: int, share: float) -> None:
    """A launch returns at its third time; every fourth returns as its kernel ends."""
    begins = [2 + n / 8 for n in range(count)]
    runs = [(s, s + 0.0625, s + (0.0625 if n % 4 == 0 else 0.03125)) for n, s in enumerate(begins)]
    assert Evidence(usual=recorded(runs)).blocking_share == share
    assert Evidence().blocking_share == 0.0


def test_pinned_share_is_of_the_time_in_allocating_calls() -> None:
    calls = [("cudaHostAlloc", 1.0, 1.5), ("cudaMalloc", 2.0, 3.5), ("cudaLaunchKernel", 4.0, 8.0),
             ("cudaMalloc", 12.0, 13.0)]  # fmt: skip
    assert Evidence(usual=recorded(calls=calls)).pinned_share == 0.25
    assert Evidence(usual=recorded()).pinned_share == 0.0


def test_kernels_of_a_step_without_a_duration_take_no_time() -> None:

    rows: Any = [{"kernel": "gemm", "family": "matmul", "time_s": 0.75}] * 2
    every = re.compile("gemm")
    assert Evidence({"kernels": rows}).kernels_named(every)[1] == 0.0
    steps: Any = [{"device": 0, "wall_s": 1.0}]
    assert Evidence({"kernels": rows, "steps": steps}).kernels_named(every)[1] == 1.0
    assert Evidence({"kernels": rows[:1], "steps": steps}).kernels_named(every, ["matmul"])[1] == 0.75
    assert Evidence({"kernels": rows, "steps": steps}).kernels_named(every, ["copy"]) == ((), 0.0)


@pytest.mark.parametrize(("share", "is_torch"), [(0.5, True), (0.499, False)])
def test_kernels_count_as_torch_s_from_half_of_their_time_on(share: float, is_torch: bool) -> None:
    of: Any = {"at::native::add": share, "fused": 1 - share, "at::native::copy": 9.0}
    rows: Any = [
        {"kernel": name, "family": "copy" if "copy" in name else "elementwise", "time_s": time_s}
        for name, time_s in of.items()
    ]
    assert Evidence({"kernels": rows}).mostly_torch(["elementwise"]) is is_torch
    assert Evidence().mostly_torch(["elementwise"])


def test_remedies_name_options_only_for_cells_of_a_command() -> None:
    config = RunConfig(precision="bf16", optimizer="adamw_fused", attention="sdpa_flash")  # type: ignore[arg-type]
    gaps: Any = [{"device": 0, "cause": "launch-bound", "time_s": 0.04}]
    bound = with_tables(gaps=gaps)
    for config_, has_options in ((config, True), (None, False), (RunConfig(workload="loop mine"), False)):
        (found,) = apply_rules(replace(bound, config=config_)).diagnoses
        assert ("--compile" in found.remedy) is has_options
