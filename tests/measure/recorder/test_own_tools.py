"""Tests of a program's own profilers, tracers and later trainings: they keep working, and the record mentions them."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cs_systems.measure.recorder import Recorder, tracker
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.unedited import ScriptRecorder
from cs_systems.record import RunRecord, read_records
from tests import forks


@contextmanager
def recorded(out: Path, **options: Any) -> Iterator[ScriptRecorder]:
    wanted: dict[str, Any] = {
        "warmup": 1,
        "steps": 4,
        "profile": "kineto",
        "profile_steps": 2,
        "stacks": False,
    } | options
    recorder = ScriptRecorder("loop", out=out, **wanted | options)
    try:
        yield recorder
    finally:
        recorder.close()


def train(steps: int, each: Callable[[int], object] = lambda step: None, optimizer: str = "Adam") -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    of_model = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.randn(3, 4)).square().mean().backward()
        of_model.step()
        of_model.zero_grad()
        each(step)


def profiled_loop(active: int, wait: int) -> int:
    """Return the number of products that the program's own profiler saw."""
    found: list[int] = []

    def count(done: profile) -> None:
        found.append(sum(event.count for event in done.key_averages() if event.key == "aten::addmm"))

    plan = schedule(wait=wait, warmup=1, active=active, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=count) as own:
        train(20, lambda step: own.step())
    (seen,) = found
    return seen


def codes(record: RunRecord) -> set[str]:
    return {caveat.code for caveat in record.warnings}


@pytest.mark.parametrize("wait", [1, 4, 5, 6], ids="program's profiler begins after step {}".format)
def test_profiler_of_the_program_keeps_its_result(wait: int, tmp_path: Path) -> None:
    """Our profiler would begin after step 5: it waits for the program's to end, and stops if that begins later."""
    with recorded(tmp_path) as recorder:
        assert profiled_loop(active=6, wait=wait) == 12
    timed, profiled = recorder.records
    assert profiled.status == "ok"
    assert profiled.measurement is not None
    assert len(profiled.measurement.timed) == 2
    assert ("own-tools" in codes(timed)) == (wait == 1)


def test_unfinished_profiler_of_the_program_prevents_our_profile(tmp_path: Path) -> None:
    with recorded(tmp_path) as recorder:
        assert profiled_loop(active=19, wait=0) == 38
    timed, profiled = recorder.records
    (caveat,) = (each for each in timed.warnings if each.code == "own-tools")
    assert caveat.message == "timed under the program's own torch.profiler, which cost time"
    assert profiled.status == "unavailable"
    assert profiled.reason == (
        "the loop ended while its own torch.profiler was active, with which no profile by kineto can be made; end it "
        "3 steps before the loop ends, or pass --with none"
    )
    assert not list(tmp_path.glob("*.trace.json.gz"))


def test_profiler_of_the_program_with_stacks_finds_the_calls_of_modules(tmp_path: Path) -> None:
    """It assumes the code of nn.Module.__call__ in each call, and the process crashes with any other code."""
    call = nn.Module.__call__

    def modules() -> set[str]:
        found = set[str]()
        own = profile(activities=[ProfilerActivity.CPU], with_stack=True)

        def profiled(step: int) -> None:
            assert nn.Module.__call__.__code__ is call.__code__
            if step == 1:
                own.start()
            elif step == 2:
                own.stop()
                found.update(event.key for event in own.key_averages() if event.key.startswith("nn.Module"))

        train(9, profiled)
        return found

    alone = modules()
    with recorded(tmp_path):
        assert modules() == alone
    assert nn.Module.__call__ is call


class CountedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountedFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [CountedOperators, CountedFunctions])
def test_dispatch_modes_of_the_program_see_only_its_own_calls(mode: type, tmp_path: Path) -> None:
    def counted() -> Counter[str]:
        with mode() as counts:
            train(9)
        names: Counter[str] = counts.names
        return names

    alone = counted()
    with recorded(tmp_path) as recorder:
        assert counted() == alone
    assert [record.status for record in recorder.records] == ["ok", "ok"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_graph_of_torch_jit_is_the_same_as_without_recording(tmp_path: Path) -> None:
    model, graphs = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), set[str]()

    def traced(_: int) -> None:
        for compiled in (torch.jit.trace(model, torch.ones(3, 4)), torch.jit.script(model)):
            graphs.add(str([node.kind() for node in compiled.inlined_graph.nodes()]))

    traced(0)
    alone = {*graphs}
    with recorded(tmp_path):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(9):
            model(torch.ones(3, 4)).sum().backward()
            traced(step)
            optimizer.step()
    assert graphs == alone


@pytest.mark.parametrize("is_script", [True, False])
def test_copies_of_a_recorded_model_have_no_hooks_of_the_recording(is_script: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan: dict[str, Any] = {"out": tmp_path, "warmup": 1, "steps": 2, "profile_steps": 3}
    recorder = ScriptRecorder("loop", **plan) if is_script else Recorder(model, optimizer, **plan).__enter__()
    for _ in range(8):
        with nullcontext() if is_script else recorder.step():
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            file = pickle.dumps(model)
            assert b"cs_systems" not in file
            for other in (pickle.loads(file), copy.deepcopy(model)):
                assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
    recorder.close()
    assert [record.status for record in recorder.records] == ["ok", "ok"]


def test_tracer_of_the_program_stays_and_is_mentioned(tmp_path: Path) -> None:
    lines: list[str] = []

    def own(frame: Any, event: str, argument: Any) -> None:
        lines.append(frame.f_code.co_name)

    before = sys.gettrace()
    with recorded(tmp_path, profile="none") as recorder:
        sys.settrace(own)
        try:
            train(8)
            assert sys.gettrace() is own
        finally:
            sys.settrace(before)
    (caveat,) = (each for each in recorder.records[0].warnings if each.code == "own-tools")
    assert caveat.message == "timed under the program's own sys.settrace, which cost time"
    assert "step" in lines


@pytest.mark.parametrize(("first", "second"), [(3, 20), (4, 12)])
def test_second_training_replaces_an_unfinished_recording(first: int, second: int, tmp_path: Path) -> None:
    with recorded(tmp_path, profile="none", steps=6) as recorder:
        train(first, optimizer="SGD")
        train(second, optimizer="AdamW")
    (record,) = recorder.records
    assert record.results["ran"][0]["optimizer"] == "AdamW"
    assert record.results["ran"][0]["models"] == "Sequential"
    assert record.measurement is not None
    assert len(record.measurement.timed) == 6
    assert recorder.later_training() is None
    for sample in record.measurement.timed:
        assert sum(sample.phases_s.values()) == pytest.approx(sample.wall_s, abs=1e-6)
        assert min(sample.phases_s[name] for name in ("forward", "backward", "optimizer")) > 0


def test_stop_ends_the_script_in_its_second_training(tmp_path: Path) -> None:
    with recorded(tmp_path, profile="none", steps=6, stop=True) as recorder:
        train(3, optimizer="SGD")
        with pytest.raises(SystemExit):
            train(20, optimizer="AdamW")
    (record,) = recorder.records
    assert record.results["ran"][0]["optimizer"] == "AdamW"
    assert record.measurement is not None
    assert len(record.measurement.timed) == 6


def test_steps_follow_an_optimizer_made_after_the_first_backward(tmp_path: Path) -> None:
    script = "import torch\ntorch.nn.Linear(4, 2)(torch.randn(3, 4)).sum().backward()\n"
    done = run(script + TRAINING.format(before="", call="model(torch.randn(3, 4))"), tmp_path, "--steps", "2:6")
    (record,) = read_records(tmp_path / "out")[0]
    assert record.results["ran"][0]["optimizer"] == "SGD", done.stderr
    assert record.measurement is not None
    assert len(record.measurement.samples) == 6
    assert "no-optimizer" not in codes(record)


def test_recording_that_is_over_keeps_no_model_alive(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = weakref.ref(model), weakref.ref(optimizer)
    with recorded(tmp_path) as recorder:
        for _ in range(9):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        assert recorder.done
        del model, optimizer
        gc.collect()
        assert [part() for part in parts] == [None, None]


def test_second_training_after_the_recorded_steps_is_mentioned(tmp_path: Path) -> None:
    with recorded(tmp_path, profile="none") as recorder:
        train(12, optimizer="SGD")
        train(30, optimizer="AdamW")
    (record,) = recorder.records
    assert record.results["ran"][0]["optimizer"] == "SGD"
    assert str(recorder.later_training()).startswith(
        "another optimizer, AdamW, stepped 30 times after the recorded steps; to record that training, write `with"
    )


@pytest.mark.parametrize("stacks", [True, False])
def test_later_trainings_of_equal_length_are_mentioned_and_not_sampled(stacks: bool, tmp_path: Path) -> None:
    """Several trainings, as of the folds of a cross-validation; sampling ends when the second one is as long."""
    switching = []
    with recorded(tmp_path, profile="none", steps=6, stacks=stacks) as recorder:
        for optimizer in ("SGD", "AdamW", "AdamW", "AdamW"):
            train(20, lambda step: switching.append(recorder.done), optimizer)
    (record,) = recorder.records
    assert record.results["ran"][0]["optimizer"] == "SGD"
    assert str(recorder.later_training()).startswith(
        "another optimizer, AdamW, stepped 60 times after the recorded steps; to record that training"
    )
    assert all(switching[41:]), "steps after the second training are as fast as alone"


def pair(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = nn.Linear(4, 2)
    return model, getattr(torch.optim, name)(model.parameters(), lr=1e-3)


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()


Left = list[tuple[list[nn.Module], list[torch.optim.Optimizer]]]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    """Models and optimizers that each recording had at its end."""
    found, forget = Left(), Subject.forget

    def kept(of: Subject) -> None:
        found.append(([*of.models], [*of.optimizers]))
        forget(of)

    monkeypatch.setattr(Subject, "forget", kept)
    return found


@pytest.mark.parametrize(("critics", "steps"), [(1, 10), (2, 5), (4, 3)])
def test_critics_that_step_as_often_as_before_are_no_later_training(
    critics: int, steps: int, left: Left, tmp_path: Path
) -> None:
    """Critics that begin after some steps; the last ones of them step after the generator's last step."""
    generator, every = pair("SGD"), [pair("AdamW") for _ in range(critics)]
    with recorded(tmp_path, profile="none", steps=20, stacks=True) as recorder:
        for iteration in range(40):
            train_one_step(*generator)
            for _ in range(steps if iteration > 12 else 0):
                for critic in every:
                    train_one_step(*critic)
        assert not recorder.done
    assert recorder.records[0].results["ran"][0]["optimizer"] == " + ".join(["SGD", *["AdamW"] * critics])
    assert recorder.later_training() is None
    ((models, optimizers),) = left
    assert len(models) == len(optimizers) == critics + 1


def test_critic_that_steps_often_at_the_end_stays_one_of_the_loop(left: Left, tmp_path: Path) -> None:
    generator, critic = pair("SGD"), pair("AdamW")
    with recorded(tmp_path, profile="none", steps=20, stacks=True) as recorder:
        for _ in range(40):
            train_one_step(*generator)
            train_one_step(*critic)
        for _ in range(20):
            train_one_step(*critic)
    ((models, optimizers),) = left
    assert ({*models}, optimizers) == ({generator[0], critic[0]}, [generator[1], critic[1]])
    assert str(recorder.later_training()).startswith("another optimizer, AdamW, stepped 21 times after the recorded")


def test_short_training_of_a_probe_in_between_does_not_end_the_sampling(tmp_path: Path) -> None:
    """Linear probe that is made anew and trained in every 25th step, the first time after the timed steps."""
    model = pair("SGD")
    with recorded(tmp_path, profile="none", steps=20, stacks=True) as recorder:
        for step in range(60):
            train_one_step(*model)
            if step % 25 == 24:
                probe = pair("AdamW")
                for _ in range(20):
                    train_one_step(*probe)
        assert not recorder.done
    assert recorder.later_training() is None


def test_training_of_the_same_model_by_another_optimizer_leaves_the_model_in_the_record(
    left: Left, tmp_path: Path
) -> None:
    model, optimizer = pair("SGD")
    finer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with recorded(tmp_path, profile="none", steps=6, stacks=True) as recorder:
        for each in (optimizer, finer):
            for _ in range(20):
                train_one_step(model, each)
    assert left == [([model], [optimizer])]
    assert str(recorder.later_training()).startswith("another optimizer, AdamW, stepped 20 times after the recorded")


def test_many_optimizers_of_a_class_that_step_rarely_are_no_later_training(tmp_path: Path) -> None:
    with recorded(tmp_path, profile="none", steps=6, stacks=False) as recorder:
        train(12, optimizer="SGD")
        for _ in range(5):
            train(4, optimizer="AdamW")
    assert recorder.later_training() is None


def test_functions_of_torch_replaced_by_the_program_stay_replaced(tmp_path: Path) -> None:
    """A function that the program puts over ours stays, and one that it had put there before is put back."""
    original, calls = torch.optim.Optimizer.zero_grad, list[str]()

    def own(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        calls.append("own")
        original(optimizer, *args)

    def replace(step: int) -> None:
        if step == 2:
            torch.optim.Optimizer.zero_grad = own  # type: ignore[method-assign,assignment]

    try:
        with recorded(tmp_path, profile="none"):
            train(8, replace)
        assert vars(torch.optim.Optimizer)["zero_grad"] is own
        assert len(calls) == 5
    finally:
        torch.optim.Optimizer.zero_grad = original  # type: ignore[method-assign]


def run(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script under `cs-systems run`."""
    file = folder / "script.py"
    file.write_text(script)
    return forks.python("-m", "cs_systems", "run", *options, "--out", str(folder / "out"), "--", str(file))


TRAINING = """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
for step in range(12):
    for part in range(2):
        {call}.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_script_that_looks_for_torch_before_it_imports_it_is_recorded(tmp_path: Path) -> None:
    looks = "import importlib.util; importlib.util.find_spec('torch')\nimport torch\n"
    script = looks + TRAINING.format(before="", call="model(torch.randn(3, 4))")
    done = run(script, tmp_path, "--steps", "2:6")
    assert done.returncode == 0, done.stderr
    assert read_records(tmp_path / "out")[0][0].status == "ok"


def test_backward_without_data_does_not_begin_the_recording(tmp_path: Path) -> None:
    """A script that counts operations on the meta device, and on fake tensors, before it trains."""
    counts = """
with torch.device("meta"):
    torch.nn.Linear(4, 2)(torch.randn(3, 4)).sum().backward()
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.nn.Linear(4, 2)(torch.randn(3, 4)).sum().backward()
"""
    done = run("import torch\n" + TRAINING.format(before=counts, call="model(torch.randn(3, 4))"), tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "out")[0]
    assert record.status == "ok"
    assert record.results["ran"][0]["optimizer"] == "SGD"


def test_optimizer_that_the_garbage_collector_does_not_list_is_found(tmp_path: Path) -> None:
    script = "import gc, torch\n" + TRAINING.format(before="gc.freeze()", call="model(torch.randn(3, 4))")
    done = run(script, tmp_path, "--steps", "2:6")
    (record,) = read_records(tmp_path / "out")[0]
    assert record.results["ran"][0]["optimizer"] == "SGD", done.stderr
    assert "no-optimizer" not in codes(record)


def test_forward_that_is_not_called_through_the_module_is_mentioned(tmp_path: Path) -> None:
    script = "import torch\n" + TRAINING.format(before="", call="model.forward(torch.randn(3, 4))")
    run(script, tmp_path, "--steps", "2:6")
    (caveat,) = (each for each in read_records(tmp_path / "out")[0][0].warnings if each.code == "no-forward")
    assert caveat.message == "no call of a module with parameters was seen"


def test_random_numbers_after_the_script_are_unchanged_by_recording(tmp_path: Path) -> None:
    seeds = "import atexit, random, torch\nrandom.seed(3)\natexit.register(lambda: print(random.random()))\n"
    script = seeds + TRAINING.format(before="", call="model(torch.randn(3, 4))")
    done = run(script, tmp_path, "--steps", "2:6", "--with", "kineto")
    random.seed(3)
    assert done.stdout == f"{random.random()}\n", done.stderr


def test_error_of_the_observation_does_not_reach_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker.Tracker, "exit", lambda *_, **__: 1 / 0)
    with recorded(tmp_path) as recorder:
        train(12)
    (record,) = recorder.records
    assert record.status == "error"
    assert "the recording ended with ZeroDivisionError" in str(record.reason)


def test_recording_that_cannot_begin_does_not_end_the_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with recorded(tmp_path / "file" / "below") as recorder:
        train(12)
    assert recorder.records == []
    assert recorder.failure is not None


def test_steps_outside_the_recorded_ones_count_in_the_time_of_the_whole_loop(tmp_path: Path) -> None:
    waits = TRAINING.format(before="import time", call="model(torch.randn(3, 4))").replace("range(12)", "range(24)")
    done = run(
        "import torch\n" + waits + "    time.sleep(0.2 if step % 6 == 5 else 0.01)\n", tmp_path, "--steps", "2:6"
    )
    assert done.returncode == 0, done.stderr
    _, line = done.stderr.split("whole loop: ")
    assert line.startswith("23 steps took ")
    assert ", every 6, in " in " ".join(line.split())
    assert max(map(len, line.splitlines())) <= 80


@pytest.mark.parametrize("every", [1, 4])
def test_counter_of_operations_within_a_step_is_found_in_its_steps_alone(tmp_path: Path, every: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, profile="none") as recorder:
        for step in range(24):
            with FlopCounterMode(display=False) if step % every == 0 else nullcontext():
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    record = recorder.records[0]
    (row,) = record.results["own_tools"]
    assert row["tool"] == "FlopCounterMode"
    assert abs(every * row["steps"] - row["of_steps"]) < every
    assert "FlopCounterMode" in next(each.message for each in record.warnings if each.code == "own-tools")
