"""Limits of evidence, of remedies that an experiment measured, and of reasons that a trace without kernels gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.usual_steps import Usual
from cs_systems.analysis.diagnosis import Diagnosis, apply_rules
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._measured import with_part
from cs_systems.analysis.diagnosis._without_kernels import why_not_judged
from cs_systems.analysis.replay import InputRemoved
from cs_systems.record import Measurement, Sample
from tests.analysis.attribution.made import Made
from tests.analysis.diagnosis.test_common_limits import waiting
from tests.analysis.diagnosis.test_exact_rules import replayed
from tests.analysis.diagnosis.test_loop_rules import inner
from tests.analysis.diagnosis.test_rule_limits import found, step
from tests.analysis.diagnosis.test_rules import experiment, with_experiments


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
