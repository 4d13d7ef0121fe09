"""Limits of evidence, of remedies that an experiment measured, and of reasons that a trace without kernels gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.distribution import DDP
from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.analysis.diagnosis import Answer, Diagnosis, Expected, apply_rules
from cs_systems.analysis.diagnosis._evidence import LEAST_OF_LOOP, ON_CPU, Evidence, of_profile, of_records
from cs_systems.analysis.diagnosis._findings import ON_TOP
from cs_systems.analysis.diagnosis._measured import after, timed_cells, with_measured, with_part
from cs_systems.analysis.diagnosis._memory_use import FOREACH
from cs_systems.analysis.diagnosis._plan import planned
from cs_systems.analysis.diagnosis._without_kernels import why_not_judged
from cs_systems.analysis.replay import Change, InputRemoved, Refusal, SyncRemoved
from cs_systems.analysis.replay import Expected as Predicted
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, Sample
from tests.analysis.attribution.made import PRODUCT, Made
from tests.analysis.diagnosis.test_common_limits import waiting
from tests.analysis.diagnosis.test_evidence import phase_row, record
from tests.analysis.diagnosis.test_exact_rules import PAGES, SLOW, calls, moved, with_copies
from tests.analysis.diagnosis.test_exact_rules import replayed as replaying
from tests.analysis.diagnosis.test_findings import cell, recorded
from tests.analysis.diagnosis.test_loop_rules import inner, repeated_modules
from tests.analysis.diagnosis.test_rule_limits import found, step
from tests.analysis.diagnosis.test_rules import experiment, measured, with_experiments
from tests.test_record import ENVIRONMENT


@pytest.mark.parametrize(("products_s", "is_known"), [(0.25, True), (0.2499, False)])
def test_step_with_a_measured_part_is_unknown_below_its_launches(products_s: float, is_known: bool) -> None:
    sample = Sample(0, False, 1.0, {"forward": 1.0}, {"forward": 0.5}, {"forward": 0.5})
    evidence = Evidence(measurement=Measurement("cuda_event", (sample,), 0.0))
    part = with_part(with_experiments(evidence, experiment("products", products_s, baseline_s=0.75)), "products")
    assert (part is not None) is is_known


@pytest.mark.parametrize(
    ("profiler", "reason"),
    [
        ("nsys", "the export has no kernels of H200; record with nsys profile --trace=cuda,nvtx"),
        ("kineto", "the trace has no kernels; record on a machine with a GPU"),
    ],
)
def test_export_of_nsys_without_kernels_was_made_without_them(profiler: str, reason: str) -> None:
    made = Made("H200")
    made.range("main", 0.0, 1.0)
    assert why_not_judged(made.profile(profiler=profiler)) == reason


@pytest.mark.parametrize(
    ("operators", "is_told"),
    [
        ([(10.0, 12.0), (16.0, 18.0)], True),
        ([(10.0, 12.0), (15.9, 17.9)], False),
        ([(10.0, 12.0), (14.0, 15.0), (17.0, 18.0)], False),
        ([(10.0, 12.0), (11.0, 18.0)], False),
        ([(10.0, 12.0)], False),
    ],
)
def test_pause_of_half_of_the_recording_is_told(operators: Sequence[tuple[float, float]], is_told: bool) -> None:
    made = Made()
    for span in operators:
        made.operator("aten::add", *span)
    assert ("passes without an operator" in why_not_judged(made.profile())) is is_told


@pytest.mark.parametrize("has_operators", [True, False])
def test_program_with_operators_or_kernels_of_pytorch_uses_it(has_operators: bool) -> None:
    made = Made()
    made.kernel("solve(float*)", 1.0, 2.0)
    if has_operators:
        made.operator("aten::mm", 0.0, 1.0)
    assert Evidence(usual=Usual(made.profile(), 1.0)).uses_torch is has_operators


def test_floor_of_a_phase_without_known_bytes_is_that_of_its_flops() -> None:
    tables: Any = {
        "cost": [{"phase": "forward", "hardware_flops": 8.0, "bytes": None}, {"phase": "loss", "hardware_flops": 2.0}],
        "ceiling": [{"peak_flops_per_s": 32.0, "peak_bytes_per_s": 1.0}],
    }
    assert [Evidence(tables).floor_s(phase) for phase in ("forward", "loss", "backward")] == [0.25, 0.0625, None]


@pytest.mark.parametrize(("block", "words"), [("127×1×1", "of 8 blocks of 127 threads, "), ("64×2×1", "of 8 blocks, ")])
def test_threads_of_a_block_are_told_below_a_warp_for_each_scheduler(block: str, words: str) -> None:
    row = {"kernel": "few", "family": "other", "time_s": 0.5, "mean_s": 0.5, "grid": "8×1×1", "block": block}
    one = found("small_grids", step({"kernels": [row]}))
    assert isinstance(one, Diagnosis)
    assert words in one.sentence


@pytest.mark.parametrize(("time_s", "share"), [(0.25, 0.75), (0.2499, 0.2499)])
def test_function_of_which_a_third_is_checks_is_a_check(time_s: float, share: float) -> None:
    one = found("value_checks", step({"inner_lines": [inner("f", 1, time_s, source="x.isnan()"), inner("f", 2, 0.5)]}))
    assert isinstance(one, Diagnosis)
    assert one.share == pytest.approx(share)


@pytest.mark.parametrize(("tables", "is_believed"), [({}, True), ({"steps": [{"device": 0, "wall_s": 1.0}]}, False)])
def test_replay_below_half_of_the_time_of_the_kernels_is_not_believed(tables: Any, is_believed: bool) -> None:
    """Without a trace that time is unknown."""
    evidence = replace(step(tables, input=0.75), known_replay=replaying(1.0, 0.4, InputRemoved()))
    (one,) = apply_rules(evidence).diagnoses
    assert (one.expected is not None) is is_believed


@pytest.mark.parametrize(
    ("forward_s", "idle_s"),
    [
        (0.25, {"launch-bound": 0.1875, "host": 0.0625, "copy": 0.125}),  # a quarter of the waits under the profiler
        (1.0, {"launch-bound": 0.75, "host": 0.25, "copy": 0.125}),
        (2.0, {"launch-bound": 0.75, "host": 0.25, "copy": 0.125}),
    ],
)
def test_gpu_of_a_loop_waits_no_longer_than_in_its_launch_bound_phases(
    forward_s: float, idle_s: dict[str, float]
) -> None:
    gaps = (("launch-bound", 0.75), ("host", 0.25), ("copy", 0.125))
    rows = [{"device": 0, "cause": cause, "time_s": time_s} for cause, time_s in gaps]
    assert waiting({"gaps": rows}, forward=forward_s).idle_s == idle_s


@pytest.mark.parametrize(("forward_s", "is_bound"), [(0.3, False), (0.301, True)])
def test_timed_step_is_host_bound_above_three_tenths(forward_s: float, is_bound: bool) -> None:
    assert waiting(forward=forward_s).is_host_bound is is_bound
    assert not Evidence({"steps": [{"device": 0, "wall_s": 1.0}]}).is_host_bound, "no phase is known"


def pass_of(kernels: int, busy_s: float = 0.0) -> Evidence:
    """Return a pass of so many kernels that waits for the GPU for about 8 s, of which it computes for this time."""
    made = Made()
    made.kernel("first", 0.0, 2.0**-10, 0.0)
    made.call("cudaDeviceSynchronize", 2.0**-10, 8.0)
    for n in range(1, kernels):
        at = 8.0 + n / 1024
        made.kernel(f"kernel_{'abcdefghijklmnopqrstuvwxyz'[n]}(float*)", at, at + 2.0**-10, at)
    if busy_s:
        made.kernel("last(float*)", 8.125, 8.125 + busy_s, 8.125)
    return of_profile(made.profile())


@pytest.mark.parametrize(("kernels", "is_judged"), [(20, True), (19, False)])
def test_pass_that_does_not_repeat_is_judged_from_20_kernels_on(kernels: int, is_judged: bool) -> None:
    assert bool(pass_of(kernels).judged) is is_judged


@pytest.mark.parametrize(("busy_s", "is_judged"), [(8.25, True), (7.5, False)])
def test_pass_of_few_kernels_is_judged_if_they_take_half_of_it(busy_s: float, is_judged: bool) -> None:
    assert bool(pass_of(3, busy_s).judged) is is_judged


@pytest.mark.parametrize(("graph_s", "is_open"), [(1.0, False), (1.001, True)])
def test_graphs_recorded_as_a_whole_leave_a_question_above_half_of_the_kernels(graph_s: float, is_open: bool) -> None:
    made = Made()
    made.kernel("CUDA graph 1", 0.0, graph_s)
    made.kernel("solve(float*)", 2.0, 3.0)
    assert any("CUDA graphs recorded as a whole" in one for one in of_profile(made.profile()).unknowns) is is_open


@pytest.mark.parametrize(("incomplete", "lacks_kernels"), [(None, True), ("kernels are missing", False)])
def test_trace_that_lacks_kernels_is_judged_unless_its_steps_do(incomplete: str | None, lacks_kernels: bool) -> None:
    made = Made()
    made.kernel("solve(float*)", 0.0, 1.0)
    found_ = replace(made.profile(lacks_kernels=lacks_kernels), incomplete=incomplete)
    assert of_profile(found_).judged
    assert not of_profile(replace(found_, trace=replace(found_.trace, lacks_kernels=True), incomplete="few")).judged


@pytest.mark.parametrize(
    ("device", "config", "judged", "not_judged"),
    [
        ("cuda", {}, "the step, judged by its timed phases alone", ""),
        ("cpu", {}, "", ON_CPU),
        ("cpu", {"workload": "loop mine"}, "the step, if all that it computes is needed", ON_CPU),
    ],
)
def test_records_of_a_cpu_are_judged_if_they_are_of_a_loop(
    device: str, config: dict[str, Any], judged: str, not_judged: str
) -> None:
    made = record({}, measured(), **config)
    found_ = of_records([replace(made, environment=replace(ENVIRONMENT, device=device))])
    assert (found_.judged, found_.not_judged) == (judged, not_judged)
    assert found_.least == (LEAST_OF_LOOP if config else None)


@pytest.mark.parametrize(("at_best", "words"), [(0.02, "r; not below 0.020 s, now 1.0 s"), (0.0199, "r")])
def test_bound_below_a_fiftieth_is_not_told(at_best: float, words: str) -> None:
    assert Diagnosis("c", "r", 1.0, at_best).sentence == f"c: {words}"


def test_cause_without_a_bound_or_time_takes_all() -> None:
    assert Diagnosis("c", "r", 4.0).share == 1.0


def test_plan_has_the_first_remedy_and_those_on_top_of_it_in_its_unit() -> None:
    known = Expected(0.5, 0.5, 0.5, "replayed")
    first = Diagnosis("first", "r", 1.0, expected=known)
    on_top = Diagnosis("on top", "r", 1.0, expected=known, then=ON_TOP)
    others = (Diagnosis("alone", "r", 1.0, expected=known), replace(on_top, unit="bytes"))
    assert Answer((first, others[0], on_top, others[1])).plan == (first, on_top)


@pytest.mark.parametrize(("known", "is_measured"), [({}, True), ({"unit": "bytes"}, False), ({"options": {}}, False)])
def test_measured_cell_tells_of_the_time_of_a_remedy_with_options(known: dict[str, Any], is_measured: bool) -> None:
    one = Diagnosis("c", "r", 1.0, options={"compile": ["default"]})
    cells = timed_cells([cell([1.0]), cell([0.5], compile="default")])
    told = with_measured(replace(one, **known), RunConfig(), cells)
    assert isinstance(told, Diagnosis)
    assert (told.expected is not None) is is_measured


EARLY = [("HtoD unified", 0.0, 2.0**-10)] * 13
SLOWER = (Apart("slow", (3,), 2.0, 1.0, None, SLOW[0].windows),)  # by one usual step


@pytest.mark.parametrize(
    ("usual", "words", "is_last"),
    [
        (with_copies(*moved(1280, "HtoD", 0.25), *moved(128, "DtoH", 2.0), apart=SLOW, **PAGES), "12% of the", False),
        (with_copies(*moved(1280, "HtoD", 0.25), *moved(128, "DtoH", 2.0), apart=SLOWER, **PAGES), "6% of the", False),
        (with_copies(*moved(128, "HtoD", 0.25), apart=SLOWER, step_s=1.001, **PAGES), "6% of the recording is", True),
        (with_copies(*EARLY, *moved(108, "HtoD", 0.25), apart=SLOW, **PAGES), None, False),
    ],
)
def test_pages_in_slow_steps_or_after_them_are_told_by_their_time(
    usual: Usual, words: str | None, is_last: bool
) -> None:
    one = found("managed_memory", Evidence(usual=usual))
    assert one is None if words is None else isinstance(one, Diagnosis)
    if isinstance(one, Diagnosis):
        assert words is not None
        assert one.cause.startswith(words)
        assert one.comes_last is is_last


def test_measured_experiment_of_the_whole_step_has_its_time() -> None:
    measured_ = after(with_experiments(step(), experiment("device-only", 0.25)), "device-only")
    assert measured_ is not None
    assert measured_.value == 0.25


@pytest.mark.parametrize(("longest_s", "is_once"), [((0.251, 0.1), True), ((0.25, 0.1), False), ((None, None), False)])
def test_one_long_pinning_of_memory_is_made_once(longest_s: tuple[float | None, ...], is_once: bool) -> None:
    rows = [
        {"device": device, "cause": "cudaMalloc", "time_s": 0.5} | ({} if each is None else {"longest_s": each})
        for device, each in enumerate(longest_s)
    ]
    usual = recorded(calls=[("cudaHostAlloc", 2.0, 2.5)], is_once=True)
    one = found("pinned_allocation", Evidence({"gaps": rows}, usual=usual))
    assert isinstance(one, Diagnosis)
    assert ("of it at once: pin the buffers before" in one.sentence) is is_once


@pytest.mark.parametrize(
    ("phase", "optimizer", "has_temporaries"),
    [
        ("optimizer", "adamw_foreach", True),
        ("optimizer", "adamw_fused", False),
        ("backward", "adamw_foreach", False),
    ],
)
def test_peak_in_an_update_of_all_parameters_at_once_has_its_temporaries(
    phase: str, optimizer: str, has_temporaries: bool
) -> None:
    results = {"memory_phases": [phase_row(phase, 20, 8, 20)]}
    memory = of_records([record(results, profiler="memory", optimizer=optimizer, device="cuda")]).memory
    assert memory is not None
    assert (FOREACH in memory.categories) is has_temporaries
    assert memory.categories.get(FOREACH, 0) == memory.categories.get("workspace", 0) * has_temporaries


@dataclass(frozen=True)
class Together:
    """Replay of a step of 20 s after one change, and after two."""

    one: Predicted | Refusal
    two: Predicted | Refusal
    step_s: float = 20.0

    def what_if(self, *changes: Change) -> Predicted | Refusal:
        return self.one if len(changes) == 1 else self.two


def lasting(value: float) -> Predicted:
    return Predicted(value, value, value, 20.0)


@pytest.mark.parametrize(
    ("takes", "one", "two", "expected"),
    [
        (10.0, lasting(19.0), lasting(18.0), [19.0, 18.0]),  # a twentieth each
        (10.0, lasting(19.001), lasting(18.0), []),
        (10.0, lasting(19.0), lasting(18.001), [19.0]),
        (1.0, Refusal("cannot be told"), lasting(1.0), [None, None]),
        (0.999, Refusal("cannot be told"), lasting(1.0), []),
        (10.0, Refusal("little", 0.05), lasting(1.0), [None, None]),
        (10.0, Refusal("little", 0.0499), lasting(1.0), []),
        (16.0, lasting(5.0), lasting(5.0), [5.0]),
        (20.0, lasting(0.4), lasting(0.4), [0.4]),  # the kernels' time is unknown
    ],
)
def test_remedy_is_planned_from_a_twentieth_of_the_step_on(
    takes: float, one: Predicted | Refusal, two: Predicted | Refusal, expected: list[float | None]
) -> None:
    found_ = [Diagnosis("c", "r", 20.0, takes=takes, change=SyncRemoved()) for _ in range(2)]
    told = planned(found_, Together(one, two))  # type: ignore[arg-type]
    assert [each.expected and each.expected.value for each in told] == expected


def lines(*rows: dict[str, Any]) -> Evidence:
    return step({"inner_lines": [*rows]})


PLAIN = {"is_plain": True}


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (lines(inner("f", 1, 0.5, **PLAIN), inner("g", 2, 0.02, phase="backward", **PLAIN)), "inside forward and back"),
        (lines(inner("f", 1, 0.5, **PLAIN), inner("g", 2, 0.0199, phase="backward", **PLAIN)), "inside the model, whi"),
        (lines(inner("f", 1, 0.02, **PLAIN), inner("g", 2, 0.5, phase="backward", **PLAIN)), "inside forward and back"),
        (lines(inner("f", 1, 0.0199, **PLAIN), inner("g", 2, 0.5, phase="backward", **PLAIN)), "inside backward, whi"),
        (
            lines(*(inner(name, 1, 0.125, **PLAIN) for name in "fgh")),
            "f() at train.py:1 (12%), g() at train.py:1 (12%)",
        ),
        (
            lines(inner("f", 1, 0.5, **PLAIN), inner("g", 2, 0.02, **PLAIN)),
            "f() at train.py:1 (50%), g() at train.py:2",
        ),
        (lines(inner("f", 1, 0.25, **PLAIN), inner("f", 2, 0.125, **PLAIN)), "tensors: f() at train.py:1 (38%)"),
        (
            lines(inner("f", 1, 0.25, **PLAIN), inner("f", 2, 0.125, place="other.py:2", **PLAIN)),
            "tensors: f() at train.py:1 (25%), f() at other.py:2 (12%)",
        ),
        (lines(inner("", 1, 0.25, **PLAIN)), "tensors: train.py:1 (25%)"),
    ],
)
def test_python_inside_the_model_is_named_by_its_place(evidence: Evidence, words: str) -> None:
    one = found("python_in_forward", evidence)
    assert isinstance(one, Diagnosis)
    assert words in one.cause
    assert not one.cause.endswith("h() at train.py:1 (12%)")


CALLED = [([], "50%"), ([(7.5, 8.0)], "40%"), ([(20.0, 22.5)], "40%"), ([(5.0, 6.0), (24.0, 25.0)], "25%")]


@pytest.mark.parametrize(("others", "share"), CALLED)
def test_copies_are_a_share_of_the_recording_with_its_calls(others: Sequence[tuple[float, float]], share: str) -> None:
    made = Made()
    made.range("main", 10.0, 20.0)
    made.copy("HtoD", 11.0, 16.0)
    for span in others:
        made.call("cudaFree", *span)
    assert why_not_judged(made.profile()).endswith(f"they take {share} of the time")


def test_operator_with_most_time_shows_that_a_program_ran_on_the_cpu() -> None:
    made = Made()
    for name, start_s, end_s in (("aten::mkldnn_conv", 0.0, 1.0), ("aten::mkldnn_linear", 1.0, 4.0)):
        made.operator(name, start_s, end_s)
    of_gpu = made.profile()
    words = why_not_judged(replace(of_gpu, trace=replace(of_gpu.trace, devices={})))
    assert words.startswith("the trace has no kernels: it ran on the CPU, 75% of its operators' time in aten::mkldnn_l")


@pytest.mark.parametrize(("calls", "words"), [(1, "1 repeated call of Conv2d"), (2, "2 repeated calls of modules")])
def test_one_repeated_call_is_of_one_module(calls: int, words: str) -> None:
    one = found("repeated_calls", step({"repeated_modules": [repeated_modules(calls=calls)]}, forward=0.5))
    assert isinstance(one, Diagnosis)
    assert words in one.cause


def multiplied(*products: tuple[int, float], step_s: float = 1.25) -> Evidence:
    """Return a step from (rows of square factors, time) of products, with a fast one that sets the attainable rate."""
    made, at = Made(), 0.0
    for size, time_s in (*products, (4096, 0.125)):
        made.operator("aten::mm", at, at + time_s / 2, (size, size), (size, size))
        made.kernel(PRODUCT, at, at + time_s, at)
        at += time_s
    return Evidence({"steps": [{"device": 0, "wall_s": step_s}]}, usual=Usual(made.profile(), step_s))


LEAST_S = 2.0**-9  # of a product of 1024 rows, at the rate of the fast one


@pytest.mark.parametrize(
    ("evidence", "words", "share"),
    [
        (multiplied((1024, 4 * LEAST_S), step_s=0.01), None, 0.0),  # 4 times the least time
        (multiplied((1024, 5 * LEAST_S), step_s=0.01), "98% of the step is matrix products that take 5 times", 0.781),
        (multiplied((1024, 0.125 + LEAST_S)), "10% of the step is matrix products that take 65 times", 0.1),
        (multiplied((1024, 0.125)), None, 0.0),
        (multiplied((64, 2e-5), step_s=1e-4), None, 0.0),  # of one launch
        (multiplied((64, 2.1e-5), step_s=1e-4), "21% of the step is matrix products that take", 0.205),
        (multiplied((2048, 0.25), (1024, 0.2421875)), "(1024×1024 by 1024×1024)", 0.38),
        (multiplied((1024, 2.5)), "100% of the step is matrix products that take 1280 times", 0.998),
    ],
)
def test_slow_products_take_four_times_as_long_as_they_need(
    evidence: Evidence, words: str | None, share: float
) -> None:
    one = found("slow_products", evidence)
    if words is None:
        assert one is None
        return
    assert isinstance(one, Diagnosis)
    assert words in one.sentence
    assert one.share == pytest.approx(share, abs=0.001)


SEVERAL, BUCKETS = "send several gradients in one all-reduce", "send larger buckets"


@pytest.mark.parametrize(
    ("count", "computes_before", "wrapper", "remedy"),
    [
        (5, (), "", SEVERAL),
        (5, (1, 2), "", None),  # 2 follow another one at once
        (5, (1, 2), DDP, BUCKETS),
        (5, (1,), "", SEVERAL),
        (4, (1,), "", None),
    ],
)
def test_small_all_reduces_of_an_own_program_mostly_follow_each_other(
    count: int, computes_before: Sequence[int], wrapper: str, remedy: str | None
) -> None:
    spans = [("all_reduce", n / 64, n / 64 + 1 / 128) for n in range(count)]
    of_steps = calls(*spans, sizes=[1024] * count, busy=[n / 64 - 1 / 256 for n in computes_before])
    evidence = Evidence({"steps": [{"device": 0, "wall_s": 1.0}]}, distribution=replace(of_steps, wrapper=wrapper))
    one = found("small_buckets", evidence)
    assert one is None if remedy is None else isinstance(one, Diagnosis)
    if isinstance(one, Diagnosis):
        assert remedy is not None
        assert one.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"grid": "66×1×1", "block": "128×1×1"}, None),  # half of the multiprocessors
        ({"grid": "65×1×1", "block": "128×1×1"}, "of few blocks, which leave most of the GPU idle (grid of 65 blocks"),
        ({"grid": "264×1×1", "block": "16×1×1"}, "of few blocks"),  # half of the lanes, and half of the schedulers
        ({"grid": "265×1×1", "block": "16×1×1"}, "of small blocks, which leave most of each warp idle"),
        ({"grid": "1×1×1", "block": "32×1×1", "mean_s": None}, None),
    ],
)
def test_small_grid_fills_less_than_half_of_the_gpu(row: dict[str, Any], words: str | None) -> None:
    whole = {"kernel": "few", "family": "other", "time_s": 0.5, "mean_s": 0.5} | row
    usual = recorded()
    on_gpu = replace(usual.profile.trace, multiprocessors={0: 132})
    usual = replace(usual, profile=replace(usual.profile, trace=on_gpu))
    tables: Any = {"kernels": [{name: each for name, each in whole.items() if each is not None}]}
    one = found("small_grids", Evidence(tables, usual=usual))
    if words is None:
        assert one is None
        return
    assert isinstance(one, Diagnosis)
    assert words in one.sentence


@pytest.mark.parametrize(
    ("direction", "start_s", "is_told"), [("HtoD", 0.5, True), ("DtoH", 0.5, False), ("HtoD", 2.0, False)]
)
def test_pages_that_move_to_the_gpu_while_kernels_run_are_prefetched(
    direction: str, start_s: float, is_told: bool
) -> None:
    tables: Any = {"kernels": [{"kernel": "few", "family": "other", "time_s": 0.5, "mean_s": 0.5, "grid": "2×4×1"}]}
    one = found("small_grids", Evidence(tables, usual=with_copies(*moved(101, direction, start_s))))
    assert isinstance(one, Diagnosis)
    assert ("prefetch" in one.remedy) is is_told


def test_pause_is_told_with_the_range_after_it() -> None:
    made = Made()
    for span in ((10.0, 12.0), (17.0, 18.0)):
        made.operator("aten::add", *span)
    for name, start_s in (("train", 10.0), ("end", 12.0), ("aten::mm", 14.0), ("late", 17.0), ("eval", 15.0)):
        made.range(name, start_s, start_s + 0.5)
    words = "62% of the recording passes without an operator (5.00 s, before 'eval'), and"
    assert why_not_judged(made.profile()).startswith(words)


def test_copies_without_a_duration_have_no_rate() -> None:
    made = Made()
    made.range("main", 10.0, 20.0)
    made.copy("HtoD", 11.0, 11.0)
    assert why_not_judged(made.profile()).endswith("only copies: 1 copy; they take 0% of the time")


def ended(until_s: float = 18.0, ranges: Sequence[tuple[str, float, float]] = (), **others: float) -> Evidence:
    """Return a process that begins at 10 s and ends its last kernel at 16 s, with other calls or copies."""
    made = Made()
    made.kernel(PRODUCT, 11.0, 16.0, 10.0)
    made.call("cudaFree", until_s, until_s)
    for name, at in others.items():
        if name == "unified":
            made.copy("DtoH unified", at, at + 2.0**-10)
        else:
            made.call(name, at, at + 2.0**-20)
    for one in ranges:
        made.range(*one)
    return Evidence(usual=Usual(made.profile(profiler="nsys"), 1.0, total_s=until_s - 10))


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (ended(), "25% of the recording follows the last kernel without a CUDA call (2.00 s)"),
        (ended(17.99), None),
        (ended(unified=16.0), None),
        (
            ended(18.5, cudaLaunchKernel=16.0),
            "29% of the recording follows the last kernel without a CUDA call (2.50 s)",
        ),
        (ended(cudaLaunchKernel=16.5), None),
        (ended(ranges=[("check", 15.0, 17.0)]), "call (2.00 s)"),  # half of it
        (ended(ranges=[("check", 15.0, 17.1)]), "call (2.00 s, in range 'check')"),
        (ended(ranges=[("check", 15.0, 18.0), ("write", 16.5, 18.0)]), "call (2.00 s, in range 'write')"),
        (ended(ranges=[("aten::mm", 15.0, 18.0)]), "call (2.00 s)"),
    ],
)
def test_quarter_of_a_process_after_its_last_kernel_is_told(evidence: Evidence, words: str | None) -> None:
    one = found("after_kernels", evidence)
    if words is None:
        assert one is None
        return
    assert isinstance(one, Diagnosis)
    assert words in one.cause
    assert evidence.usual is not None
    assert (one.now, one.evidence[0]["recording_s"]) == (evidence.usual.total_s,) * 2


ONCE: dict[str, Any] = {"profiler": "nsys", "is_once": True}


def many(kernels: int) -> Usual:
    """Return a process with so many kernels after a copy to the device."""
    runs = [(1 + n / 64, 1 + (n + 1) / 64, 1.0) for n in range(kernels)]
    return with_copies(("HtoD", 0.25, 0.75), runs=runs, total_s=4.0, **ONCE)


@pytest.mark.parametrize(
    ("usual", "words", "is_outside"),
    [
        (
            with_copies(("HtoD", 0.25, 0.5), total_s=4.0, **ONCE),
            "copies to the device before the first kernel (",
            False,
        ),
        (
            with_copies(("HtoD", 0.4375, 0.5), ("DtoH", 1.0, 2.1875), total_s=4.0, **ONCE),
            "kernel and to the host",
            False,
        ),
        (
            with_copies(("HtoD", 0.4376, 0.5), ("DtoH", 1.0, 2.1875), total_s=4.0, **ONCE),
            "copies to the host af",
            False,
        ),
        (with_copies(("DtoH", 1.0, 3.0), total_s=4.0, **ONCE), "50% of the recording is copies to the host", False),
        (with_copies(("DtoH", 1.0, 3.01), total_s=4.0, **ONCE), "50% of the recording is copies to the host", True),
        (many(19), "copies to the device before the first kernel", False),
        (many(20), None, False),
    ],
)
def test_copies_around_the_only_pass_of_a_process(usual: Usual, words: str | None, is_outside: bool) -> None:
    one = found("blocking_copies", Evidence(usual=usual))
    if words is None:
        assert one is None
        return
    assert isinstance(one, Diagnosis)
    assert words in one.cause
    assert one.is_outside is is_outside


def elementwise(time_s: float = 0.25, casts_s: float = 0.0, saved_s: float | None = None) -> Evidence:
    """Return a step of 8 elementwise kernels of PyTorch and 2 casts, of which fusion saves this time."""
    of = (("at::native::add", "elementwise", time_s, 8.0), ("at::native::bfloat16_copy_kernel", "copy", casts_s, 2.0))
    rows = [
        {"kernel": name, "phase": "forward", "family": family, "time_s": lasts_s, "calls_per_step": calls_}
        for name, family, lasts_s, calls_ in of
        if lasts_s
    ]
    tables: Any = {"kernels": [*rows, {"kernel": "gemm", "family": "matmul", "time_s": 0.5, "calls_per_step": 1.0}],
                   "phases": rows, "steps": [{"device": 0, "wall_s": 1.0}]}  # fmt: skip
    return Evidence(tables if saved_s is None else tables | {"fusable": [{"saved_s": saved_s}]})


@pytest.mark.parametrize(
    ("evidence", "words", "at_best"),
    [
        (elementwise(casts_s=0.1875), "8 elementwise kernels, casts and norms take 25% of the step", 0.75),
        (elementwise(1.0), "8 elementwise kernels, casts and norms take 100% of the step", 0.0),
        (elementwise(saved_s=0.06), "8 elementwise kernels", 0.75),
        (elementwise(saved_s=0.0599), None, None),
    ],
)
def test_elementwise_kernels_of_no_other_rule_are_fused(
    evidence: Evidence, words: str | None, at_best: float | None
) -> None:
    one = found("unfused_elementwise", evidence)
    if words is None:
        assert one is None
        return
    assert isinstance(one, Diagnosis)
    assert words in one.cause
    assert one.at_best == at_best
