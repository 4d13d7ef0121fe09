"""Activations that are written as formulas of several operators, and elementwise operators that are no such formula."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cs_systems.analysis.comparison.loop_findings import ACTIVATION_FORMULAS
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder.activation_formulas import ACTIVATIONS, ActivationFormulas, Formula, formulas
from cs_systems.measure.recorder.graph_size import nodes_below
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.subject import Subject
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import activated, gelu_by_a_formula

TANH, ERF, SILU, MISH = ACTIVATIONS
Activation = Callable[[Tensor], Tensor]


def multiplications(root: Tensor) -> list[Any]:
    return [node for node in nodes_below(root) if node.name() == "MulBackward0"]


def observing() -> ActivationFormulas:
    observer = ActivationFormulas(Subject("loop", resolve("cpu"), [], [], None, 1), lambda: 0)
    observer.begins(Period.WARMUP)
    return observer


def found(activation: Activation, scale: float = 2.0) -> list[Formula]:
    torch.manual_seed(0)
    x = scale * torch.randn(64, 96, requires_grad=True)
    return [*formulas(multiplications(activation(x).square().sum()))]


def fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def by_density(x: Tensor) -> Tensor:
    return x * (0.5 * (torch.erf(x / math.sqrt(2)) + 1))


WRITTEN: dict[str, tuple[Activation, str, int]] = {
    "power": (gelu_by_a_formula, TANH, 8),
    "products": (fast, TANH, 9),
    "error_function": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), ERF, 5),
    "density": (by_density, ERF, 5),
    "silu": (lambda x: x * torch.sigmoid(x), SILU, 2),
    "silu_backwards": (lambda x: x.sigmoid() * x, SILU, 2),
    "mish": (lambda x: x * torch.tanh(functional.softplus(x)), MISH, 3),
    "of_a_transposed_tensor": (lambda x: gelu_by_a_formula(x.reshape(96, 64).t()), TANH, 8),
    "of_a_part": (lambda x: (parts := torch.cat([x, x], 1).chunk(2, 1))[0] * parts[0].sigmoid() + parts[1], SILU, 2),
    "of_a_sum": (lambda x: gelu_by_a_formula(x + x.detach().flip(0)), TANH, 8),
    "of_a_product": (lambda x: gelu_by_a_formula(x * x.sin()), TANH, 8),
}
ROWS = (torch.arange(64) < 8).float()  # 1 in the first rows


class Sigmoid(torch.autograd.Function):
    """Sigmoid with a gradient of 1."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.sigmoid()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


OTHERS: dict[str, Activation] = {
    "operator": functional.gelu,
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "other_constant": lambda x: 0.5 * x * (1 + torch.tanh(0.7 * (x + 0.044715 * torch.pow(x, 3)))),
    "other_addend": lambda x: 0.5 * x * (1.1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gated": lambda x: x * torch.sigmoid(x.flip(0)),
    "cell_of_parts": lambda x: torch.sigmoid((parts := torch.cat([x, -x], 1).chunk(2, 1))[0]) * torch.tanh(parts[1]),
    "gated_halves": lambda x: x[:, :48] * torch.sigmoid(x[:, 48:]),
    "masked": lambda x: x * (ROWS[:, None] * torch.sigmoid(x)),
    "masked_behind": lambda x: x * (torch.sigmoid(x) * ROWS[:, None].expand(-1, 96)),
    "biased": lambda x: x * torch.sigmoid(x + (1 - ROWS)[:, None]),
    "addend_of_rows": lambda x: 0.5 * x * (ROWS[:, None] + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_far_from_0": lambda x: (y := x * 1e-3 + 20) * torch.sigmoid(1.702 * y),
    "tanh_far_from_0": lambda x: (y := x * 1e-3 + 20) * torch.tanh(y),
    "own_sigmoid": lambda x: x * Sigmoid.apply(x),
    "divided": lambda x: x * (1 / (1 + torch.exp(-x))),
    "half_of_a_product": lambda x: x * torch.sigmoid(x) * x,
    "cell": lambda x: torch.sigmoid(x.sin()) * torch.tanh(x.cos()),
    "dropped_out": lambda x: functional.dropout(x, 0.5) * torch.sigmoid(x),
    "changed_in_place": lambda x: gelu_by_a_formula(x + 1).mul_(2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_activation_by_a_formula_is_found(name: str) -> None:
    activation, function, operators = WRITTEN[name]
    each = max(found(activation), key=lambda one: len(one.operators))
    assert (each.function, each.shape, len(each.operators)) == (function, (64, 96), operators)


@pytest.mark.parametrize("name", WRITTEN)
def test_operators_of_a_formula_are_those_of_the_program(name: str) -> None:
    each = max(found(WRITTEN[name][0]), key=lambda one: len(one.operators))
    x = torch.randn(each.shape, requires_grad=True)
    torch.testing.assert_close(each.result(x), ACTIVATIONS[each.function](x))


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_are_no_formula(name: str) -> None:
    kinds = {each.function for each in found(OTHERS[name])}
    assert kinds == ({SILU} if name == "half_of_a_product" else {TANH} if name == "changed_in_place" else set())


def test_small_inputs_do_not_make_functions_equal() -> None:
    assert found(OTHERS["quick"], scale=0.02) == []
    assert [each.function for each in found(WRITTEN["silu"][0], scale=0.02)] == [SILU]
    assert found(WRITTEN["silu"][0], scale=1e-3) == [], "no input is large enough"


def test_other_precision_and_small_tensors_are_not_compared() -> None:
    x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    assert [*formulas(multiplications(gelu_by_a_formula(x).sum()))] == []
    x = torch.randn(64, 63, requires_grad=True)
    assert [*formulas(multiplications(gelu_by_a_formula(x).sum()))] == []


def test_time_that_the_operator_saves_is_measured(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, activated(gelu_by_a_formula))
    (row,) = ACTIVATION_FORMULAS.of(recorder.records[0].results)
    assert (row["activation"], row["operators"], row["elements"]) == (TANH, 8, 256 * 1024)
    assert (row["calls"], row["steps"]) == (2, 3)
    assert 0 < row["one_s"] < row["time_s"]


def test_kept_tensors_are_not_read_if_a_program_packs_them(tmp_path: Path) -> None:
    unpacked = list[Tensor]()

    def unpack(kept: Tensor) -> Tensor:
        unpacked.append(kept)
        return kept

    calls = list[int]()

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return gelu_by_a_formula(x)

    def again(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(counted, x, use_reentrant=False)
        return result

    def packed(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda kept: kept, unpack):
            return gelu_by_a_formula(x)

    steps = 40
    assert "activation_formulas" not in recorded(tmp_path / "1", activated(again), steps).records[0].results
    assert len(calls) == 2 * 2 * steps
    assert "activation_formulas" not in recorded(tmp_path / "2", activated(packed), steps).records[0].results


def test_passes_over_one_graph_count_its_formulas_once() -> None:
    observer = observing()
    for _ in range(3):
        x = torch.randn(64, 96, requires_grad=True)
        loss = gelu_by_a_formula(x).sum()
        for _ in range(4):
            observer.look_before_backward(loss)
            loss.backward(retain_graph=True)
        observer.look_after_step()
    observer.stop_looking()
    observer.end()
    assert [row["calls"] for row in ACTIVATION_FORMULAS.of(observer.kept)] == [1]


def test_second_derivatives_have_no_row() -> None:
    observer = observing()
    for _ in range(3):
        x = torch.randn(64, 96, requires_grad=True)
        values = gelu_by_a_formula(x).sum()
        observer.look_before_backward(values)
        (slope,) = torch.autograd.grad(values, x, create_graph=True)
        observer.look_before_backward(slope.square().sum())
        observer.look_after_step()
    observer.stop_looking()
    observer.end()
    assert ACTIVATION_FORMULAS.of(observer.kept) == ()


class Held:
    """Object that lives as long as a graph."""


class Holds(torch.autograd.Function):
    """Identity with a graph that holds an object."""

    held: ClassVar[list[weakref.ref[Held]]] = []

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.held = Held()
        Holds.held[:] = [weakref.ref(context.held)]
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_looking_keeps_no_graph_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        loss = gelu_by_a_formula(Holds.apply(torch.randn(64, 96, requires_grad=True))).sum()
        (kept,) = Holds.held
        assert [*formulas(multiplications(loss))]
        del loss
        assert kept() is None
    finally:
        gc.enable()


def test_model_without_a_formula_has_no_row(tmp_path: Path) -> None:
    assert "activation_formulas" not in recorded(tmp_path, activated(nn.GELU())).records[0].results
