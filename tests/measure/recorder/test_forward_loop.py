"""Tests of `cs-systems run` on scripts without a backward pass: their forward passes are recorded."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from cs_systems import Recorder
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.measure.recorder import hooks, unedited
from cs_systems.measure.recorder.forward_loop import FIRST_CALL
from cs_systems.measure.recorder.unedited import ScriptRecorder
from cs_systems.record import RunRecord, read_records
from tests import forks

BEGIN = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
"""
EVALUATION = """
data = DataLoader(TensorDataset(torch.randn(8 * BATCHES, 16), torch.randint(16, (8 * BATCHES,))), 8)
with torch.no_grad():
    print(sum(model(x).argmax(-1).eq(y).sum().item() for x, y in data))
"""
TRAINING = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(1)
for _ in range(300):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
print(model[0].weight.sum().item())
"""
GENERATION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(50, 64), nn.Linear(64, 192), nn.Linear(64, 50)
    def forward(self, tokens, cache):
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v)[:, -1]), (k, v)

model, cache, tokens = Attention().eval(), None, torch.randint(50, (8, 16))
with torch.inference_mode():
    for _ in range(CALLS):
        logits, cache = model(tokens, cache)
        tokens = torch.multinomial(logits.softmax(-1), 1)
print(tokens.tolist())
"""


Python = Callable[..., subprocess.CompletedProcess[str]]


def started(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, in which no module of the tests speaks of a training."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


def ran(
    tmp_path: Path, program: str, *options: str, python: Python = forks.python
) -> tuple[subprocess.CompletedProcess[str], list[RunRecord]]:
    """Run a program alone and recorded; it must print the same. Return the recorded one and its records."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(BEGIN + program)
    alone = forks.python(str(script))
    done = python("-m", "cs_systems", "run", "--steps", "2:8", *options, "--out", str(out), "--", str(script))
    if "--stop" not in options:
        assert done.stdout == alone.stdout, done.stderr
    assert done.returncode == alone.returncode == 0, done.stderr
    return done, read_records(out)[0] if (out / "records.jsonl").exists() else []


def phases(record: RunRecord) -> set[str]:
    assert record.measurement is not None
    return {name for name in record.measurement.phase_names() if max(record.measurement.durations_s(name)) > 0}


def told(record: RunRecord, code: str = "forward-only") -> str:
    return next(caveat.message for caveat in record.warnings if caveat.code == code)


def steps(record: RunRecord) -> int:
    assert record.measurement is not None
    return len(record.measurement.samples)


def test_generation_has_a_step_for_each_token(tmp_path: Path) -> None:
    done, (record,) = ran(tmp_path, GENERATION.replace("CALLS", "60"))
    assert (record.status, steps(record), phases(record)) == ("ok", 8, {"forward", "other"})
    assert told(record) == "no backward pass ran: a step is a call of Attention"
    assert record.results["ran"][0]["models"] == "Attention"
    assert "optimizer" not in record.results["ran"][0]
    for word in ("training", "optimizer", "gradient"):
        assert word not in done.stderr


def test_generation_that_ends_early_has_the_steps_so_far(tmp_path: Path) -> None:
    _, (record,) = ran(tmp_path, GENERATION.replace("CALLS", str(FIRST_CALL + 5)))
    assert steps(record) == 5
    assert "3 of 6 steps were timed" in told(record, "few-samples")


def test_denoising_with_gradients_on_is_recorded_with_a_word_on_them(tmp_path: Path) -> None:
    _, (record,) = ran(tmp_path, "x = torch.randn(8, 16)\nfor _ in range(50): x = x - 0.1 * model(x).detach()\n")
    assert steps(record) == 8
    expected = "a step is a call of Sequential; autograd records it, which torch.inference_mode() leaves out"
    assert told(record).endswith(expected)


def test_evaluation_has_the_phase_of_its_data_loader(tmp_path: Path) -> None:
    _, (record,) = ran(tmp_path, EVALUATION.replace("BATCHES", "60"))
    assert (steps(record), phases(record)) == (8, {"input", "forward", "other"})


def test_modules_called_in_turns_are_one_step(tmp_path: Path) -> None:
    """The first module begins the step, though another one is called more often, and a third has no parameters."""
    program = (
        "encoder, norm, x = nn.Linear(16, 16), nn.LayerNorm(16), torch.randn(4, 16)\n"
        "with torch.no_grad():\n"
        "    for _ in range(40):\n"
        "        x = norm(model(nn.ReLU()(norm(norm(encoder(x))))))\n"
        "        time.sleep(0.005)\n"
    )
    _, (record,) = ran(tmp_path, program)
    assert record.measurement is not None
    assert told(record).endswith("a call of Linear")
    assert record.results["ran"][0]["models"] == "Linear + LayerNorm + Sequential"
    assert min(sample.phases_s["other"] for sample in record.measurement.samples) >= 0.005, "each step has one pause"


def test_module_inside_another_is_not_the_step(tmp_path: Path) -> None:
    program = (
        "class Outer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = model\n"
        "    def forward(self, x):\n"
        "        return self.inner(self.inner(x))\n"
        "outer, x = Outer(), torch.ones(2, 16)\n"
        "with torch.no_grad():\n"
        "    for _ in range(40): outer(x)\n"
    )
    _, (record,) = ran(tmp_path, program)
    assert (told(record).split()[-1], record.results["ran"][0]["models"]) == ("Outer", "Outer")


def test_longer_loop_of_another_model_is_recorded_instead(tmp_path: Path) -> None:
    program = (
        "small = nn.Linear(16, 16)\n"
        "with torch.no_grad():\n"
        f"    for _ in range({FIRST_CALL + 3}): small(torch.ones(2, 16))\n"
        "    for _ in range(60): model(torch.ones(2, 16))\n"
    )
    _, (record,) = ran(tmp_path, program)
    assert (steps(record), told(record).split()[-1]) == (8, "Sequential")


@pytest.mark.timeout(120)
def test_compiled_model_is_compiled_as_without_the_recorder(tmp_path: Path) -> None:
    program = (
        "compiled = torch.compile(model, backend='aot_eager')\n"
        "with torch.no_grad():\n"
        "    for rows in [2] * 30 + [5] * 10: compiled(torch.ones(rows, 16))\n"
        "from torch._dynamo.utils import counters\n"
        "print(counters['stats'], counters['frames'], counters['graph_break'])\n"
    )
    _, (record,) = ran(tmp_path, program)
    assert (steps(record), told(record).split()[-1]) == (8, "Sequential")


def test_compiled_function_that_calls_a_model_is_compiled_as_without_the_recorder(tmp_path: Path) -> None:
    program = (
        "@torch.compile(backend='aot_eager')\n"
        "def predict(x): return model(x).argmax(-1)\n"
        "with torch.no_grad():\n"
        "    for _ in range(30): predict(torch.ones(2, 16))\n"
        "from torch._dynamo.utils import counters\n"
        "print(counters['stats'], counters['frames'], counters['graph_break'])\n"
    )
    ran(tmp_path, program)


def test_few_calls_are_no_loop(tmp_path: Path) -> None:
    done, records = ran(tmp_path, "for _ in range(3): model(torch.ones(2, 16))\n")
    assert records == []
    message = (
        "the script ran no backward pass of torch in its main thread, and called a model only 3 times; run a script"
    )
    assert message in done.stderr


def test_stop_ends_a_script_that_speaks_of_no_training(tmp_path: Path) -> None:
    done, (record,) = ran(tmp_path, EVALUATION.replace("BATCHES", "60") + "print('end')\n", "--stop", python=started)
    assert (done.stdout, steps(record)) == ("", 8)


def test_script_that_only_may_train_runs_to_its_end_without_a_profiler(tmp_path: Path) -> None:
    """Evaluate with the text of a training, as a script does with an option such as --evaluate."""
    program = EVALUATION.replace("BATCHES", "60") + "if len(sys.argv) > 1:\n    torch.optim.SGD(model.parameters())\n"
    done, (record,) = ran(tmp_path, program, "--stop", "--with", "kineto")
    assert (steps(record), done.stderr.count("profiler_start")) == (8, 0)
    assert "words of a training, so --stop did not end it and no profiler was started" in " ".join(done.stderr.split())


def test_profile_follows_the_timing(tmp_path: Path) -> None:
    _, (timed, profiled) = ran(tmp_path, GENERATION.replace("CALLS", "60"), "--with", "kineto", python=started)
    assert (steps(timed), profiled.status) == (8, "ok")
    assert {"step", "forward"} <= {row["range"] for row in profiled.results["ranges"]}
    assert (tmp_path / "out" / profiled.artifacts["trace"]).is_file()


def comparable(records: list[RunRecord]) -> list[Any]:
    """Return what depends neither on times nor on the script's text."""
    return [
        (
            record.status, record.config, steps(record), sorted(phases(record)), without_code(record),
            record.results.get("outcome"), record.results.get("updates"), sorted(record.artifacts),
        )
        for record in records
    ]  # fmt: skip


def without_code(record: RunRecord) -> dict[str, Any]:
    return {name: value for name, value in record.results["ran"][0].items() if not name.startswith("workload_")}


STATE = """
import gc, threading
from torch.optim import optimizer as of
print(nn.Module.__call__ is nn.Module._wrapped_call_impl, len(of._global_optimizer_pre_hooks))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [(), ("--stop",), ("--with", "kineto")], ids=["timed", "stop", "kineto"])
@pytest.mark.parametrize("batches", [20, 80])
def test_training_after_an_evaluation_is_recorded_as_without_it(
    batches: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Evaluate for fewer and for more steps than the recording has."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train = TRAINING + STATE
    done, records = ran(tmp_path / "a", EVALUATION.replace("BATCHES", str(batches)) + train, *options)
    plain, expected = ran(tmp_path / "b", train, *options)
    assert comparable(records) == comparable(expected)
    kinds = [sorted(file.suffix for file in (tmp_path / of / "out").iterdir()) for of in "ab"]
    assert kinds[0] == kinds[1]
    assert done.stderr.count("profiler_start") == plain.stderr.count("profiler_start")
    for word in ("forward-only", "no backward"):
        assert word not in done.stderr
    if not options:
        assert done.stdout.endswith("True 0\n")


def test_actions_before_the_first_update_are_no_loop_of_their_own(tmp_path: Path) -> None:
    program = (
        "optimizer, state = torch.optim.Adam(model.parameters()), torch.randn(4, 16)\n"
        "for _ in range(15):\n"
        "    with torch.no_grad():\n"
        "        for _ in range(50): state = 0.9 * state + model(state)\n"
        "    optimizer.zero_grad(); model(state).pow(2).mean().backward(); optimizer.step()\n"
    )
    _, (record,) = ran(tmp_path, program)
    assert (steps(record), record.results["ran"][0]["optimizer"]) == (8, "Adam")
    assert {"backward", "optimizer"} <= phases(record)


def test_teacher_before_the_first_backward_pass_is_part_of_the_training(tmp_path: Path) -> None:
    program = (
        "teacher, optimizer = nn.Linear(16, 16), torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(15):\n"
        "    x = torch.randn(4, 16)\n"
        "    with torch.no_grad(): target = teacher(x)\n"
        "    optimizer.zero_grad(); nn.functional.mse_loss(model(x), target).backward(); optimizer.step()\n"
    )
    _, (record,) = ran(tmp_path, program)
    assert (steps(record), record.results["ran"][0]["models"]) == (8, "Linear + Sequential")


def test_steps_of_an_optimizer_without_a_backward_pass_are_no_inference(tmp_path: Path) -> None:
    program = (
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(40):\n"
        "    with torch.no_grad():\n"
        "        for _ in range(3): model(torch.randn(4, 16))\n"
        "    for p in model.parameters(): p.grad = torch.randn_like(p)\n"
        "    optimizer.step()\n"
    )
    done, records = ran(tmp_path, program)
    assert records == []
    assert "because the script ran no backward pass of torch in its main thread; run a script" in done.stderr


def state() -> tuple[Any, ...]:
    autograd: Any = torch.autograd
    return (
        nn.Module.__call__, torch.compile, torch.Tensor.__dict__.get("item"), autograd._engine_run_backward,
        len(gc.callbacks), threading.active_count(), len(optimizers._global_optimizer_pre_hooks), hooks.is_active(),
    )  # fmt: skip


@pytest.mark.parametrize("calls", [FIRST_CALL + 1, FIRST_CALL + 5, FIRST_CALL + 10, FIRST_CALL + 400])
def test_nothing_is_left_of_an_abandoned_recording(calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon it in its warm-up, its timing, its profile and its end."""
    monkeypatch.setattr(unedited, "may_train", lambda: False)
    before, model = state(), nn.Linear(4, 4)
    recorder = ScriptRecorder("script", out=tmp_path, warmup=2, steps=6, profile="kineto", forward=True)
    assert recorder._forward is not None
    with torch.no_grad():
        for _ in range(calls):
            model(torch.ones(2, 4))
    assert recorder._forward.recorder is not None
    recorder._forward.abandon()
    now = state()
    assert (*now[:3], *now[4:]) == (*before[:3], *before[4:])
    assert [*tmp_path.iterdir()] == []
    model(torch.ones(2, 4)).sum().backward()
    recorder.close()
    assert [record.status for record in recorder.records] == ["error"], "the loop of one backward pass, as ever"
    assert state() == before


def test_recorder_of_the_script_takes_the_place_of_a_recording_that_has_begun(tmp_path: Path) -> None:
    recorder = ScriptRecorder("script", out=tmp_path / "script", warmup=2, steps=6, profile="none", forward=True)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        for _ in range(FIRST_CALL + 4):
            model(torch.ones(2, 4))
        with Recorder(model, out=tmp_path / "own", warmup=1, steps=2, profile="none", stacks=False) as own:
            for _ in range(8):
                with own.step():
                    model(torch.ones(2, 4))
    recorder.close()
    assert (recorder.records, [record.status for record in own.records]) == ([], ["ok"])
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward, "no later pass begins it"


def test_work_between_the_calls_is_no_preparation_of_batches(tmp_path: Path) -> None:
    """The input of a call is made from the result of the one before, in which no worker of a loader can help."""
    program = (
        "def choose(y):\n"
        "    return y * (sum(i * i % 7 for i in range(20_000)) / 1e9)\n"
        "x = torch.ones(2, 16)\n"
        "with torch.no_grad():\n"
        "    for _ in range(150):\n"
        "        y = model(x)\n"
        "        x = choose(y)\n"
    )
    done, (record,) = ran(tmp_path, program)
    assert not any(row.get("feeds_model") for row in record.results["own_python"])
    assert "choose" in done.stderr
    for word in ("next batch", "cs-systems advise"):
        assert word not in done.stderr


def test_time_that_grows_with_the_inputs_is_told(tmp_path: Path) -> None:
    program = (
        "tokens = torch.randn(4, 16, 16)\n"
        "wide = nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 16))\n"
        "with torch.no_grad():\n"
        "    for _ in range(80): tokens = torch.cat([tokens, wide(tokens)[:, -16:]], 1)\n"
    )
    _, (record,) = ran(tmp_path, program, "--steps", "5:30")
    (row,) = (row for row in record.results["growth"] if row["quantity"] == "step time")
    assert row["is_inference"]
    (found,) = (each for each in diagnose([record]).diagnoses if "longer with each step" in each.cause)
    assert found.remedy.startswith("find what grows in the model's inputs: keep keys and values in a cache")
