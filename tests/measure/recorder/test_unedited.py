"""Tests with loops in the styles of public scripts: every step is found, and nothing in them changes."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from cs_systems import Recorder
from cs_systems.measure.recorder.unedited import ScriptRecorder
from cs_systems.record import RunRecord, read_records
from tests import forks
from tests.measure.recorder import styles
from tests.measure.recorder.styles import STEPS, STYLES, digest

SEEN = {
    "gan": {"input", "forward", "loss", "backward", "optimizer", "zero_grad"},
    "reinforcement": {"forward", "loss", "backward", "optimizer", "other"},
    "accumulation": {"input", "forward", "loss", "backward", "clip", "optimizer", "other"},
    "closure": {"input", "forward", "loss", "backward", "optimizer", "zero_grad"},
    "compiled": {"input", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "other"},
    "several_optimizers": {"input", "forward", "loss", "backward", "optimizer"},
    "scaler": {"input", "forward", "loss", "backward", "clip", "optimizer"},
}
OPTIMIZERS = {"gan": "Adam + Adam", "closure": "LBFGS", "several_optimizers": "AdamW + SGD", "reinforcement": "Adam"}


@pytest.mark.parametrize("style", SEEN)
def test_every_step_is_found_and_the_result_is_the_same(style: str, tmp_path: Path) -> None:
    recorder = ScriptRecorder(style, out=tmp_path, warmup=2, steps=100, profile="none")
    found = digest(style)
    recorder.close()
    assert found == digest(style)
    (record,) = recorder.records
    assert record.measurement is not None
    assert len(record.measurement.samples) == STEPS
    assert {name for name in record.measurement.phase_names() if sum(record.measurement.durations_s(name))} >= SEEN[
        style
    ]
    assert "recompiled" not in [caveat.code for caveat in record.warnings]
    (ran,) = record.results["ran"]
    assert ran["optimizer"] == OPTIMIZERS.get(style, "AdamW")
    if style == "reinforcement":  # the environment is no part of the loss, but after the last forward pass
        assert median(record.measurement.durations_s("other")) >= 3 * styles.ACTION_S
        assert ran["models"] == "Sequential"


class Listed(nn.Linear):
    """Layer with a method `parameters` of its own, as in meta-learning: it returns a list and knows no `recurse`."""

    def parameters(self) -> Any:  # type: ignore[override]
        return nn.ParameterList([self.weight, self.bias])


def test_model_with_its_own_list_of_parameters_is_recorded(tmp_path: Path) -> None:
    recorder = ScriptRecorder("listed", out=tmp_path, warmup=2, steps=6, profile="none")
    model = Listed(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    recorder.close()
    (record,) = recorder.records
    assert (recorder.failure, record.status) == (None, "ok")
    assert all(each.failure is None for each in recorder._observers._every)


def test_script_that_ends_in_the_warm_up_gets_the_option_of_its_command(tmp_path: Path) -> None:
    recorder = ScriptRecorder("gan", out=tmp_path, warmup=100, steps=10, profile="none")
    digest("gan")
    recorder.close()
    assert str(recorder.records[0].reason).endswith(f" steps, or time fewer steps: --steps 1:{STEPS}")


def test_caveat_says_that_optimizers_step_at_different_rates(tmp_path: Path) -> None:
    recorder = ScriptRecorder("gan", out=tmp_path, warmup=0, steps=100, profile="none")
    digest("three_critic_steps")
    recorder.close()
    (record,) = recorder.records
    assert record.measurement is not None
    assert len(record.measurement.samples) == 3 * STEPS
    (caveat,) = (caveat for caveat in record.warnings if caveat.code == "mixed-steps")
    assert caveat.message == "one optimizer steps up to 3 times for a step of another, and each is a step here"
    assert "with recorder.step():" in caveat.remedy
    assert "unstable" not in {each.code for each in record.warnings}


def test_script_without_an_optimizer_has_a_step_for_each_backward_pass(tmp_path: Path) -> None:
    """Run it in a process in which no optimizer is left."""
    options = ["--steps", "2:100", "--out", str(tmp_path)]
    done = forks.python("-m", "cs_systems", "run", *options, "--", styles.__file__, "no_optimizer")
    assert done.stdout == f"{digest('no_optimizer')}\n", done.stderr
    record = read_records(tmp_path)[0][0]
    assert len(samples(record)) == STEPS
    (caveat,) = (caveat for caveat in record.warnings if caveat.code == "no-optimizer")
    assert caveat.message == "no optimizer stepped: a step is one backward pass"


class SharpnessAware(torch.optim.Optimizer):
    """Optimizer around another that shifts the weights between two backward passes (Foret et al. 2021)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    @torch.no_grad()
    def shift(self, sign: float) -> None:
        for weight in self.base.param_groups[0]["params"]:
            weight.add_(torch.ones_like(weight), alpha=0.01 * sign)

    def step(self, closure: Any = None) -> None:
        self.shift(-1.0)
        self.base.step()


def test_weights_that_change_between_two_passes_do_not_end_a_step(tmp_path: Path) -> None:
    """Two backward passes are one step, although weights change between them, as if a compiled optimizer stepped."""
    model = torch.nn.Linear(4, 2)
    recorder = ScriptRecorder("sharp", out=tmp_path, warmup=2, steps=100, profile="none")
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(12):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.shift(1.0)
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()
    (record,) = recorder.records
    assert "no-optimizer" not in {caveat.code for caveat in record.warnings}
    assert 6 < len(samples(record)) < 12
    assert "SharpnessAware" in str(record.results["ran"][0]["optimizer"])


def test_optimizer_that_never_steps_is_mentioned(tmp_path: Path) -> None:
    unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    recorder = ScriptRecorder("no_optimizer", out=tmp_path, warmup=2, steps=100, profile="none")
    digest("no_optimizer")
    recorder.close()
    assert recorder.records[0].reason == (
        "the loop ended before an optimizer stepped; let it run longer, or, if it updates its parameters itself, name "
        "the iteration: Recorder(...), and with recorder.step(): around the body of the loop"
    )
    del unused


@pytest.mark.parametrize("style", ["gan", "scaler"])
def test_stop_ends_the_script_after_its_last_recorded_step(style: str, tmp_path: Path) -> None:
    before = torch.autograd._engine_run_backward, len(_global_optimizer_post_hooks)
    recorder = ScriptRecorder(style, stop=True, out=tmp_path, warmup=1, steps=2, profile="kineto", profile_steps=2)
    with pytest.raises(SystemExit) as ended:
        STYLES[style]()
    recorder.close()
    assert ended.value.code == 0
    timed, profiled = recorder.records
    assert (len(samples(timed)), len(samples(profiled))) == (3, 4)  # the profile keeps the last clean ones
    assert "of 2 steps" not in " ".join(caveat.message for caveat in timed.warnings)
    assert (torch.autograd._engine_run_backward, len(_global_optimizer_post_hooks)) == before


class Held:
    """Object that lives as long as the graph of a step."""


class Holds(torch.autograd.Function):
    """Identity with a graph that holds an object."""

    held: ClassVar[list[weakref.ref[Held]]] = []

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.held = Held()
        Holds.held.append(weakref.ref(context.held))
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_recording_keeps_no_graph_alive_where_nothing_collects_cycles(tmp_path: Path) -> None:
    recorder = ScriptRecorder("held", out=tmp_path, warmup=6, steps=4, profile="none")
    model = styles.two_layers(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    Holds.held.clear()
    gc.collect()
    gc.disable()
    try:
        for _ in range(16):
            loss = Holds.apply(model(torch.ones(2, 4))).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            del loss
            assert [each for each in Holds.held if each() is not None] == []
    finally:
        gc.enable()
        recorder.close()
    assert len(Holds.held) == 16


def test_stop_with_stacks_ends_the_script_after_the_steps_in_which_they_were_sampled(tmp_path: Path) -> None:
    recorder = ScriptRecorder("sampled", stop=True, stacks=True, out=tmp_path, warmup=1, steps=2, profile="none")
    model, steps = styles.two_layers(4), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for number in range(100):
            steps.append(number)
            time.sleep(0.05)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    with pytest.raises(SystemExit) as ended:
        train()
    recorder.close()
    assert ended.value.code == 0
    (record,) = recorder.records
    assert len(samples(record)) == 3 < len(steps) < 100
    assert any("sleep" in str(row) or Path(__file__).name in str(row) for row in record.results["own_python"])


def test_script_that_ends_before_its_last_step_was_not_ended_by_stop(tmp_path: Path) -> None:
    recorder = ScriptRecorder("short", stop=True, out=tmp_path, warmup=1, steps=50, profile="none")
    model = styles.two_layers(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    recorder.close()
    (row,) = recorder.records[0].results["unsampled"]
    assert "--stop" not in str(row)


def test_profile_of_a_stopped_script_may_wait_for_the_device_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synchronise where torch.profiler and a snapshot do so on CUDA: the wait is a phase, which the recorder finds."""
    export = torch.profiler.profile.export_chrome_trace

    def waits_and_exports(profiler: torch.profiler.profile, path: str) -> None:
        torch.cuda.synchronize()
        export(profiler, path)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", waits_and_exports)
    recorder = ScriptRecorder("waits", stop=True, out=tmp_path, warmup=1, steps=2, profile="kineto", profile_steps=2)
    with pytest.raises(SystemExit):
        STYLES["scaler"]()
    recorder.close()
    assert [(r.status, r.config["profiler"]) for r in recorder.records] == [("ok", "none"), ("ok", "kineto")]


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = styles.two_layers(4), torch.nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))  # type: ignore[no-any-return]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("is_script", [True, False])
def test_profile_names_modules_in_forward_and_backward(is_script: bool, calls: int, tmp_path: Path) -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        torch.stack([model(torch.randn(3, 4)).pow(2).mean() for _ in range(calls)]).sum().backward()
        optimizer.step()

    options = {"out": tmp_path, "warmup": 1, "steps": 1, "profile": "kineto", "profile_steps": 2}
    if is_script:
        recorder: Recorder = ScriptRecorder("script", **options)
        for _ in range(6):
            step()
        recorder.close()
    else:
        with Recorder(model, optimizer, **options) as recorder:
            for _ in range(6):
                with recorder.step():
                    step()
    rows = {(row["phase"], row["range"]): row for row in recorder.records[1].results["ranges"]}
    for phase in ("forward", "backward"):
        assert {name for where, name in rows if where == phase} >= {"Blocks", "first.0", "first.1", "second"}
        assert rows[phase, "second"]["calls_per_step"] == calls
    assert rows["loss", "loss"]["calls_per_step"] > 0


def samples(record: RunRecord) -> tuple[object, ...]:
    assert record.measurement is not None
    return record.measurement.samples
