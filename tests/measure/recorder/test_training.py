"""Faults of what a loop trains are named first; sound loops that look similar have no such cause."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from cs_systems.analysis.comparison.loop_findings import DENSE_GRADIENTS, REPEATED_CALLS
from cs_systems.analysis.diagnosis import Rule, diagnose
from cs_systems.analysis.diagnosis._evidence import of_records
from cs_systems.core import plugins
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder.observers import EnginePass
from cs_systems.measure.recorder.same_derivatives import SameDerivatives
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.training import Training
from cs_systems.measure.recorder.unedited import ScriptRecorder
from tests.measure.recorder.trainings import (
    FAULTS,
    SOUND,
    Step,
    evaluation_on_the_same_batch,
    forget_compilations,
    metric_by_another_call,
)

CODES = {code for _, code in FAULTS.values()} | {"double-precision", "own-tools"}
WRONG = {
    "flat-operators",
    "replaced-parameters",
    "remade-optimizers",
    "samples-as-time",
    "same-randomness",
    "evaluation-mode",
    "cut-samples",
    "empty-clipping",
    "rate-as-factor",
    "gradients-not-cleared",
    "no-update",
    "paired-targets",
    "unused-passes",
    "divergence",
}  # which come before causes of time
STEPS = 40


def recorded(out: Path, step: Step, steps: int = STEPS) -> ScriptRecorder:
    """Record the steps as those of an unedited script: 5 warm-up, 12 timed, and steps of which the stack is sampled."""
    forget_compilations()
    recorder = ScriptRecorder("script", out=out, warmup=5, steps=12, profile="none")
    try:
        for _ in range(steps):
            step()
    finally:
        recorder.close()
    return recorder


def codes(recorder: ScriptRecorder) -> set[str]:
    """Return the codes of what the loop trains wrongly, or for nothing, however little time it takes."""
    evidence = of_records(recorder.records)
    rules: dict[str, Rule] = {code: plugins.get("diagnosis", code.replace("-", "_")) for code in CODES}
    return {code for code, rule in rules.items() if rule.find(evidence) is not None}


@pytest.mark.filterwarnings(
    "ignore:Anomaly Detection", "ignore:Using a target size", "ignore:`parameters` is an empty generator"
)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_training_is_found(name: str, tmp_path: Path) -> None:
    loop, code = FAULTS[name]
    recorder = recorded(tmp_path, loop(), 3 * STEPS if name == "steps_of_a_third" else STEPS)
    assert all(each.failure is None for each in recorder._observers._every)
    assert code in codes(recorder)
    if code in WRONG:
        assert diagnose(recorder.records).diagnoses[0].code == code


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:`parameters` is an empty generator")
@pytest.mark.parametrize("name", SOUND)
def test_healthy_training_has_no_cause_of_a_fault(name: str, tmp_path: Path) -> None:
    recorder = recorded(tmp_path, SOUND[name]())
    assert all(each.failure is None for each in recorder._observers._every)
    assert recorder.records[0].results["updates"]
    assert codes(recorder) == set()


@pytest.mark.parametrize("shapes", [[(8, 16)], [(16, 8), (16,)]])
def test_unused_tensors_of_the_optimizer_are_no_replaced_layer(shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    """They belong to no module either, such as a prompt for a later phase, and the body is not frozen."""
    model = torch.nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    later = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    optimizer = torch.optim.SGD([*model[2].parameters(), *later], 0.1)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
        optimizer.step()

    assert codes(recorded(tmp_path, step)) == {"unused-gradients"}


@pytest.mark.parametrize("in_evaluation", [True, False])
def test_second_call_in_evaluation_mode_keeps_its_own_metric(in_evaluation: bool, tmp_path: Path) -> None:
    loop = evaluation_on_the_same_batch() if in_evaluation else metric_by_another_call(after_update=True)
    evidence = of_records(recorded(tmp_path, loop).records)
    (row,) = REPEATED_CALLS.of(evidence.tables)
    assert row["evaluated"] == (row["calls"] if in_evaluation else 0)
    found = plugins.get("diagnosis", "repeated_calls").find(evidence)
    assert ("in evaluation mode" in found.cause, "detach()" in found.remedy) == (in_evaluation, not in_evaluation)


def test_ended_observer_keeps_no_optimizer() -> None:
    table = nn.Embedding(12_000, 64)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    subject = Subject("loop", resolve("cpu"), [table], [optimizer], None, 1)
    training = Training(subject, nullcontext)
    table(torch.tensor([1, 2])).sum().backward()
    training.look_before_update(optimizer)
    training.end()
    assert [row["used"] for row in DENSE_GRADIENTS.of(training.kept)] == [2]
    known = weakref.ref(optimizer)
    subject.optimizers.clear()
    del optimizer
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("again", [True, False])
def test_calls_of_grad_are_remembered_without_their_graphs(again: bool) -> None:
    observer = SameDerivatives()
    points = torch.rand(8, 3, requires_grad=True)
    outputs = [points.square().sum()] * 2 if again else [points.square().sum() for _ in range(2)]
    for output in outputs:
        (slope,) = torch.autograd.grad(output, points, create_graph=True)
        observer.look_at_pass(EnginePass([output], [None], [points], [slope]))
    assert observer._again_here == again
    known = weakref.ref(points)
    outputs.clear()
    del points, output, slope
    gc.collect()
    assert known() is None


def test_error_of_one_observer_leaves_the_others_and_the_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Training, "look_after_backward", lambda _: 1 / 0)
    recorder = recorded(tmp_path, FAULTS["hook_per_step"][0]())
    (failure,) = (each.failure for each in recorder._observers._every if each.failure is not None)
    assert isinstance(failure, ZeroDivisionError)
    assert "updates" not in recorder.records[0].results
    assert recorder.records[0].status == "ok"
    assert codes(recorder) == {"growing-hooks"}


def test_observation_adds_no_operator_to_a_profile_of_the_program(tmp_path: Path) -> None:
    step = FAULTS["never_cleared"][0]()
    recorder = ScriptRecorder("script", out=tmp_path, warmup=5, steps=12, profile="none")
    names: list[list[str]] = []
    try:
        for _ in range(25):
            with profile(activities=[ProfilerActivity.CPU]) as own:
                step()
            names.append(sorted(event.name for event in own.events() or () if event.name.startswith("aten::")))
    finally:
        recorder.close()
    assert all(each.failure is None for each in recorder._observers._every)
    differ = {step for step, each in enumerate(names) if each != names[2]}
    assert differ <= {0, 17}, "the first step allocates, and the losses are read where the timing ends"
    assert "updates" not in recorder.records[0].results
