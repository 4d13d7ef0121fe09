"""Limits of evidence, of remedies that an experiment measured, and of reasons that a trace without kernels gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.analysis.diagnosis import Answer, Diagnosis, Expected, apply_rules
from cs_systems.analysis.diagnosis._evidence import ON_CPU, Evidence, of_profile, of_records
from cs_systems.analysis.diagnosis._findings import ON_TOP
from cs_systems.analysis.diagnosis._measured import after, timed_cells, with_measured, with_part
from cs_systems.analysis.diagnosis._without_kernels import why_not_judged
from cs_systems.analysis.replay import InputRemoved
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, Sample
from tests.analysis.attribution.made import Made
from tests.analysis.diagnosis.test_common_limits import waiting
from tests.analysis.diagnosis.test_evidence import record
from tests.analysis.diagnosis.test_exact_rules import PAGES, SLOW, moved, replayed, with_copies
from tests.analysis.diagnosis.test_findings import cell
from tests.analysis.diagnosis.test_loop_rules import inner
from tests.analysis.diagnosis.test_rule_limits import found, step
from tests.analysis.diagnosis.test_rules import experiment, measured, with_experiments
from tests.test_record import ENVIRONMENT


@pytest.mark.parametrize(("products_s", "is_known"), [(0.25, True), (0.2499, False)])
def test_step_with_a_shorter_part_is_unknown_below_the_time_of_its_launches(products_s: float, is_known: bool) -> None:
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


@pytest.mark.parametrize(("pause_s", "is_told"), [(4.0, True), (3.9, False)])
def test_pause_of_half_of_the_recording_is_told(pause_s: float, is_told: bool) -> None:
    made = Made()
    made.operator("aten::add", 0.0, 2.0)
    made.operator("aten::add", 2.0 + pause_s, 4.0 + pause_s)
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
    evidence = replace(step(tables, input=0.75), known_replay=replayed(1.0, 0.4, InputRemoved()))
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
        ("cpu", {"workload": "loop mine"}, "the step, judged by its timed phases alone", ON_CPU),
    ],
)
def test_records_of_a_cpu_are_judged_if_they_are_of_a_loop(
    device: str, config: dict[str, Any], judged: str, not_judged: str
) -> None:
    made = record({}, measured(), **config)
    found_ = of_records([replace(made, environment=replace(ENVIRONMENT, device=device))])
    assert (found_.judged, found_.not_judged) == (judged, not_judged)


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


def test_experiment_of_the_whole_step_has_its_time() -> None:
    measured_ = after(with_experiments(step(), experiment("device-only", 0.25)), "device-only")
    assert measured_ is not None
    assert measured_.value == 0.25
