"""Functions in which the GPU has no work: those that wait for it many times, and those that compute on the host."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.analysis.diagnosis import apply_rules
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.record import Measurement, Sample
from tests.analysis.diagnosis.test_loop_rules import CHECKS, LOOP, inner, own

PHASES = {"forward": 0.02, "backward": 0.03, "host_sync": 0.015, "other": 0.025, "copy": 0.01}
READ = own("mask", 8, 0.015, "torch.randint", phase="host_sync") | {"share": 0.98}
PREPARED = own("mask", 9, 0.02, "fill") | {"feeds_model": True}


def loop(tables: dict[str, Any], lag_s: float = 0.0) -> Evidence:
    """Return the evidence of a loop on a GPU, which ends the waits so much later than the host submits them."""
    sample = Sample(0, False, 0.1, PHASES, PHASES, dict.fromkeys(PHASES, 0.0) | {"host_sync": lag_s})
    return Evidence(tables, Measurement("cuda_event", (sample,) * 10, 0.0), LOOP, judged="the step's time")  # type: ignore[arg-type]


def waiting(calls: float = 512.0, within: str = "aten::item in host_sync") -> dict[str, Any]:
    return {"call": "cudaStreamSynchronize", "within": within, "calls_per_step": calls, "time_s": 0.004}


def long_wait(time_s: float) -> dict[str, Any]:
    return waiting(1.0, "aten::_to_copy in host_sync") | {"time_s": time_s}


def codes(evidence: Evidence) -> list[str]:
    return [each.code for each in apply_rules(evidence).diagnoses]


def test_preparation_that_waits_for_the_gpu_is_named_with_its_waits_first() -> None:
    found = apply_rules(loop({"own_python": [PREPARED, READ], "waits": [waiting()]})).diagnoses
    assert found[0].sentence.startswith(
        "35% of the step is mask(), which prepares the next batch and waits for the GPU 512 times (.item()), so that "
        "the GPU has no work (train.py:8): keep these numbers on the GPU: draw and use them as tensors, for the whole "
        "batch at once (masks by comparison, torch.where); or draw on the host what only the host reads (Python's "
        "random); not below 58 ms, now 100 ms"
    )
    assert "batch-preparation" not in [each.code for each in found]


def test_only_the_waits_that_hold_nearly_all_their_time_are_counted() -> None:
    def found(long: dict[str, Any]) -> Evidence:
        return loop({"own_python": [PREPARED, READ], "waits": [waiting(), long]})

    first = apply_rules(found(long_wait(0.0004))).diagnoses[0]
    assert "waits for the GPU 512 times (.item())" in first.sentence
    assert "host-synchronisation" not in codes(found(long_wait(0.0005)))


@pytest.mark.parametrize(
    ("prepared", "read", "wait", "lag_s"),
    [
        (PREPARED, READ, waiting(99.0), 0.0),
        (PREPARED, READ, waiting(within="optimizer"), 0.0),
        (PREPARED, READ | {"share": 0.89}, waiting(), 0.0),
        (PREPARED, READ | {"function": "log"}, waiting(), 0.0),
        (PREPARED, READ, waiting(), 0.014),  # the GPU works while the host waits
    ],
    ids=["fewer waits", "waits elsewhere", "waits of several functions", "waits of another function", "a busy GPU"],
)
def test_preparation_is_no_wait_for_the_gpu(prepared: Any, read: Any, wait: Any, lag_s: float) -> None:
    found = codes(loop({"own_python": [prepared, read], "waits": [wait]}, lag_s))
    assert "batch-preparation" in found
    assert "host-synchronisation" not in found


def silent(*lines: dict[str, Any], forward_s: float = 0.016) -> Evidence:
    """Return a loop in which the GPU waits while the host makes no call, most of the time in forward."""
    gaps = [{"device": 0, "cause": "host", "time_s": forward_s + 0.004, "longest_s": 0.01}]
    parts = {"forward": forward_s, "copy": 0.004}
    host_gaps = [{"host": host, "time_s": time_s, "longest_s": 0.01} for host, time_s in parts.items()]
    steps = [{"device": 0, "wall_s": 0.1, "busy_share": None}]
    return loop({"gaps": gaps, "steps": steps, "host_gaps": host_gaps, "inner_lines": [*lines]})


def sentence(evidence: Evidence) -> str:
    (found,) = (each for each in apply_rules(evidence).diagnoses if each.code == "host-time")
    return found.sentence


def test_function_with_most_of_the_silent_time_of_forward_is_named() -> None:
    words = sentence(silent(inner("bias", 8, 0.012), inner("bias", 9, 0.005), inner("Net.forward", 20, 0.003)))
    assert "(80% in forward, mostly in bias() at train.py:8; 20% in copy): if it computes with tensors on" in words


@pytest.mark.parametrize(
    ("lines", "forward_s"),
    [
        ([inner("bias", 8, 0.0119)], 0.016),  # 8 of 16 ms at least are in the function only from 12 ms on
        ([inner("bias", 8, 0.018, samples=9)], 0.016),
        ([inner("", 8, 0.018)], 0.016),
        ([inner("bias", 8, 0.018, phase="loss")], 0.016),
    ],
    ids=["not for certain", "few samples", "no function", "another phase"],
)
def test_function_is_not_named_without_most_of_the_silent_time(lines: list[dict[str, Any]], forward_s: float) -> None:
    words = sentence(silent(*lines, forward_s=forward_s))
    assert "(80% in forward, 20% in copy): move this work out of the step" in words


def test_checks_of_distributions_come_before_the_launches_that_wait_for_them() -> None:
    tables = {
        "gaps": [{"device": 0, "cause": "launch-bound", "time_s": 0.06}],
        "steps": [{"device": 0, "wall_s": 0.1, "busy_share": None}],
        "waits": [waiting(350.0, "aten::is_nonzero in host_sync")],
        "distribution_checks": [CHECKS],
    }
    checks, launches = apply_rules(loop(tables)).diagnoses
    assert (checks.code, launches.code) == ("distribution-checks", "launch-bound")
    assert checks.takes == 0.024
    assert "(most of them are checks of torch.distributions: set_default_validate_args(False))" in launches.sentence
    few = tables | {"distribution_checks": [CHECKS | {"step_waits": 174}]}
    launches = apply_rules(loop(few)).diagnoses[1]
    assert "(.item(), synchronize())" in launches.sentence


def of_checks(tables: dict[str, Any], phases_s: dict[str, float], lag_s: dict[str, float]) -> list[float | None]:
    """Return the time of the checks in a step of 0.1 s with these phases, if it is worth a sentence."""
    sample = Sample(0, False, 0.1, phases_s, phases_s, dict.fromkeys(phases_s, 0.0) | lag_s)
    known = Measurement("cuda_event", (sample,) * 10, 0.0)
    evidence = Evidence(tables | {"distribution_checks": [CHECKS]}, known, LOOP, judged="the step's time")
    return [each.takes for each in apply_rules(evidence).diagnoses if each.code == "distribution-checks"]


def traced(time_s: float) -> dict[str, Any]:
    """Return the tables of a trace in which the GPU waits so long for the host's launches."""
    gaps = [{"device": 0, "cause": "launch-bound", "time_s": time_s}]
    return {"gaps": gaps, "steps": [{"device": 0, "wall_s": 0.1, "busy_share": None}]}


@pytest.mark.parametrize(
    ("tables", "lag_s", "takes"),
    [
        ({}, {"forward": 0.03, "backward": 0.03}, []),
        ({}, {"forward": 0.03}, [0.02]),
        ({}, {}, [0.024]),
        (traced(0.008), {}, [0.008]),
        (traced(0.002), {}, []),
    ],
    ids=["a busy GPU", "a GPU that waits in backward", "a waiting GPU", "a trace", "a trace of a busy GPU"],
)
def test_checks_take_at_most_the_time_in_which_the_gpu_waits(
    tables: dict[str, Any], lag_s: dict[str, float], takes: list[float]
) -> None:
    assert of_checks(tables, {"forward": 0.08, "backward": 0.02}, lag_s) == takes


@pytest.mark.parametrize("tables", [{}, traced(0.05)], ids=["no trace", "a trace"])
def test_checks_do_not_take_the_time_in_which_the_gpu_waits_for_a_batch(tables: dict[str, Any]) -> None:
    phases_s, lag_s = {"input": 0.04, "forward": 0.05, "backward": 0.01}, {"forward": 0.04}
    assert of_checks(tables, phases_s, lag_s) == [pytest.approx(0.01)]
    assert of_checks(tables, phases_s, lag_s | {"backward": 0.01}) == []
