"""Scripts of which no optimizer ever steps have a cause; those that update their weights themselves have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from cs_systems.analysis.diagnosis import diagnose
from cs_systems.measure.recorder.unedited import ScriptRecorder
from tests.measure.recorder.trainings import loss_of, net

PASSES = 30
Script = Callable[[int], object]


@contextmanager
def recorded(out: Path, found: list[ScriptRecorder]) -> Iterator[None]:
    recorder = ScriptRecorder("script", out=out, warmup=2, steps=5, profile="none")
    error: BaseException | None = None
    try:
        yield
    except (SystemExit, KeyboardInterrupt, ValueError) as ended:
        error = ended
    finally:
        recorder.close(error)
    found.append(recorder)


def record_of(out: Path, script: Callable[[int], object], passes: int) -> ScriptRecorder:
    found: list[ScriptRecorder] = []
    with recorded(out, found):
        script(passes)
    return found[0]


def sentence(recorder: ScriptRecorder) -> str | None:
    found = [one for one in diagnose(recorder.records).diagnoses if one.code == "no-update"]
    return found[0].sentence if found else None


def too_long_an_accumulation(passes: int, per_epoch: int = 6, accumulate: int = 8) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    for number in range(passes):
        if number % per_epoch == 0:
            optimizer.zero_grad()
        (loss_of(model) / accumulate).backward()
        if (number % per_epoch + 1) % accumulate == 0:
            optimizer.step()


def without_a_step(passes: int) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(passes):
        optimizer.zero_grad()
        loss_of(model).backward()
    raise SystemExit


@pytest.mark.parametrize("script", [too_long_an_accumulation, without_a_step])
def test_script_without_a_step_of_its_optimizer_is_named(script: Script, tmp_path: Path) -> None:
    recorder = record_of(tmp_path, script, PASSES)
    text = sentence(recorder)
    assert text is not None
    assert text.startswith("the optimizer never stepped: SGD updates no weight in 30 backward passes (backward at ")
    assert ("step() at test_never_stepped.py:" in text) == (script is too_long_an_accumulation)
    assert recorder.records[0].reason == (
        "the loop ended before an optimizer stepped; call step() of an optimizer after the backward passes, or let it "
        "run longer"
    )


def own_update(change: Callable[[nn.Parameter], object]) -> Script:
    def script(passes: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(passes):
            optimizer.zero_grad()
            loss_of(model).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    change(parameter)

    return script


def in_place(parameter: nn.Parameter) -> None:
    parameter -= 0.1 * gradient_of(parameter)


def of_data(parameter: nn.Parameter) -> None:
    parameter.data.sub_(0.1 * gradient_of(parameter))


def into_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data - 0.1 * gradient_of(parameter)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def gradients_of_inputs(passes: int) -> None:
    """Compute saliency maps or attacks with a model that has its optimizer from a checkpoint."""
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(passes):
        optimizer.zero_grad()
        inputs = torch.randn(16, 8, requires_grad=True)
        model(inputs).sum().backward()


def gradients_of_another_model(passes: int) -> None:
    optimizer, model = SGD(net().parameters(), 0.1), net()
    for _ in range(passes):
        optimizer.zero_grad()
        loss_of(model).backward()


def gradients_without_backward(passes: int) -> None:
    model = net()
    parameters = SGD(model.parameters(), 0.1).param_groups[0]["params"]
    for _ in range(passes):
        torch.autograd.grad(loss_of(model), parameters)


def weights_of_a_functional_model(passes: int) -> None:
    """Update weights that are new tensors in each step, next to an optimizer that holds the first ones."""
    first = torch.zeros(8, 4, requires_grad=True)
    optimizer = SGD([first], 0.1)
    weights = first
    for _ in range(passes):
        optimizer.zero_grad()
        functional.cross_entropy(torch.randn(16, 8) @ weights, torch.randint(4, (16,))).backward()
        weights = (weights - 0.1 * weights.grad).detach().requires_grad_()  # type: ignore[operator]


def new_model_for_each_fold(passes: int) -> None:
    for _ in range(passes // 6):
        too_long_an_accumulation(6)


def interrupted(passes: int) -> None:
    too_long_an_accumulation(passes)
    raise KeyboardInterrupt


def failed(passes: int) -> None:
    too_long_an_accumulation(passes)
    raise ValueError("no such file")


@pytest.mark.parametrize(
    "script",
    [
        own_update(in_place),
        own_update(of_data),
        own_update(into_data),
        gradients_of_inputs,
        gradients_of_another_model,
        gradients_without_backward,
        weights_of_a_functional_model,
        new_model_for_each_fold,
        interrupted,
        failed,
    ],
)
def test_script_that_updates_its_weights_itself_is_no_cause(script: Script, tmp_path: Path) -> None:
    assert sentence(record_of(tmp_path, script, PASSES)) is None


def late_own_update(passes: int) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    for number in range(passes):
        loss_of(model).backward()
        if number == passes - 4:  # after the last comparison but the one at the end
            for parameter in model.parameters():
                of_data(parameter)
            optimizer.zero_grad()
    kept.append(model)


kept: list[nn.Module] = []  # so that the weights can be compared at the end


def test_own_update_between_two_comparisons_is_seen_at_the_end(tmp_path: Path) -> None:
    assert sentence(record_of(tmp_path, late_own_update, 24)) is None


def test_few_backward_passes_without_a_step_are_no_cause(tmp_path: Path) -> None:
    assert sentence(record_of(tmp_path, too_long_an_accumulation, 9)) is None


def test_long_accumulation_that_steps_is_no_cause(tmp_path: Path) -> None:
    recorder = record_of(tmp_path, lambda passes: too_long_an_accumulation(passes, PASSES, 12), PASSES)
    assert sentence(recorder) is None
