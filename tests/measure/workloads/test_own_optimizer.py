"""Optimizers of the user's own, `path.py:name`, in the built-in step and in that of any model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from cs_systems import run
from cs_systems.analysis.comparison.own_code import OPTIMIZER_ERROR
from cs_systems.cli import main
from cs_systems.config import RunConfig, preset
from cs_systems.core.tables import first_row
from cs_systems.formulas.memory.fit import known_by_formula
from cs_systems.record import RunRecord

# As students write it: the update of the course's text, with the decay after the step.
SOURCE = """
import torch
from torch import nn


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, betas=(0.5, 0.5), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.data
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = beta1 * state.get("m", torch.zeros_like(p)) + (1 - beta1) * grad
                v = state["v"] = beta2 * state.get("v", torch.zeros_like(p)) + (1 - beta2) * grad**2
                rate = group["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
                p.data -= rate * m / (v.sqrt() + group["eps"])
                p.data -= group["lr"] * group["weight_decay"] * p.data


class SGD(AdamW):  # a wrong one: the name is torch's, the update is not
    pass


class Mine(AdamW):
    pass


class Closed(AdamW):
    def step(self, closure):
        return super().step()


class Sharded(AdamW):
    def __init__(self, params, optimizer_cls, **options):
        super().__init__(params)


class Numbered(AdamW):
    def __init__(self, params, rank):
        super().__init__(params)


def nothing(params):
    return None


number = 3
"""
TINY = RunConfig(model=preset("tiny"), batch_size=1, seq_len=8, warmup=0, steps=1, device="cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def measured(source: Path, name: str, **options: Any) -> RunRecord:
    return run(TINY, optimizer=f"{source}:{name}", in_process=True, **options)


def test_own_optimizer_steps_and_is_recorded_with_its_hash(source: Path) -> None:
    record = measured(source, "AdamW")
    ran = first_row(record.results, "ran")
    assert (record.status, ran["optimizer"]) == ("ok", f"{source}:AdamW")
    assert ran["optimizer_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert {*record.frame()["phase"]} == {"forward", "loss", "backward", "optimizer", "step"}


def test_flops_of_the_step_stay_known_and_bytes_and_memory_of_the_optimizer_do_not(source: Path) -> None:
    record = measured(source, "AdamW")
    costs = {row["phase"]: row for row in record.results["cost"]}
    assert costs["forward"]["model_flops"]
    assert costs["optimizer"]["bytes"] is None
    assert known_by_formula(record) is None


@pytest.mark.parametrize(("name", "least", "most"), [("AdamW", 0.0, 1e-3), ("SGD", 0.5, 100.0)])
def test_own_optimizer_stands_next_to_torchs_of_the_same_name(
    source: Path, name: str, least: float, most: float
) -> None:
    """Given the hyperparameters that the signature takes, not those that it has as defaults."""
    (row,) = OPTIMIZER_ERROR.of(measured(source, name).results)
    assert (row["reference"], row["steps"]) == (f"torch.optim.{name}", 20)
    assert least <= (row["error"] or 0.0) <= most


def test_optimizer_without_a_namesake_has_no_row(source: Path) -> None:
    assert not OPTIMIZER_ERROR.of(measured(source, "Mine").results)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("Closed", "unavailable", "Closed requires an argument of step()"),
        ("Sharded", "error", "wraps the class of another optimizer; name it as strategy, such as ddp_bucketed+"),
        ("Numbered", "error", "Numbered(params, rank) requires rank; name a class such as AdamW(params, lr=1e-3"),
        ("nothing", "error", "optimizer returned None, which is no optimizer; give a class"),
        ("number", "error", "number is 3; name a class such as"),
    ],
)
def test_what_is_no_optimizer_is_refused_with_what_is(source: Path, name: str, status: str, reason: str) -> None:
    record = measured(source, name)
    assert record.status == status
    assert reason in (record.reason or "")


def test_own_optimizer_replaces_that_of_an_own_model(source: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(2, 2), torch.randn(3, 2)\n")
    config = RunConfig(workload=f"{model}:make", optimizer=f"{source}:AdamW", warmup=0, steps=1, device="cpu")
    record = run(config, in_process=True)
    assert first_row(record.results, "ran")["optimizer"] == f"{source}:AdamW", record.reason


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("mine.py", "'mine.py' names a file, but no object in it; write mine.py:name"),
        ("mine.py:AdamV", "mine.py has no 'AdamV'; did you mean AdamW?"),
        ("other.py:AdamW", "file 'other.py' (from 'other.py:AdamW') does not exist"),
        ("adamx", "unknown optimizer 'adamx'; did you mean adamw"),
    ],
)
def test_name_of_no_optimizer_is_refused_before_anything_runs(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], optimizer: str, message: str
) -> None:
    monkeypatch.chdir(source.parent)
    assert main(["time", "--optimizer", optimizer]) == 2
    assert message in capsys.readouterr().err


def test_time_compares_optimizers_in_one_table(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(source.parent)
    options = ["--size", "tiny", "--context-length", "8", "--batch-size", "1", "--steps", "2", "--warmup", "1"]
    assert main(["time", *options, "--optimizer", "adamw", "mine.py:AdamW", "--out", "run", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.index("adamw ") < text.index("mine.py:AdamW ")
    assert "torch.optim.AdamW" in text
