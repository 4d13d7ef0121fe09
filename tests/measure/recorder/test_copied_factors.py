"""Copies of one tensor that batched products multiply, and other factors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cs_systems.analysis.comparison.loop_findings import COPIED_FACTORS, CopiedFactorRow
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder import copied_factors
from cs_systems.measure.recorder.copied_factors import CopiedFactors
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.operator_times import Products
from cs_systems.measure.recorder.subject import Subject
from tests.measure.recorder.test_training import recorded

SAMPLES, CAPSULES, ROWS, COLUMNS = 8, 48, 16, 12
Product = Callable[[Tensor, Tensor], Tensor]


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.Parameter(torch.randn(CAPSULES, ROWS, COLUMNS))


def rows(product: Product, steps: int = 3, dtype: torch.dtype = torch.float32) -> list[CopiedFactorRow]:
    """Return what the observer finds in steps with this product of the weights and inputs."""
    model = Capsules().to(dtype)
    observer = CopiedFactors(Subject("loop", resolve("cpu"), [model], [], None, 1), lambda: 0)
    observer.begins(Period.WARMUP)
    try:
        for _ in range(steps):
            x = torch.randn(SAMPLES, CAPSULES, COLUMNS, 1, dtype=dtype)
            root = product(model.weights, x).square().mean()
            observer.look_before_backward(root)
            root.backward()
            observer.look_after_step()
    finally:
        observer.stop_looking()
    observer.end()
    return [*COPIED_FACTORS.of(observer.kept)]


def reshaped(copies: Tensor, x: Tensor) -> Tensor:
    return copies.reshape(-1, ROWS, COLUMNS) @ x.flatten(0, 1)


COPIED: dict[str, Product] = {
    "stack": lambda w, x: torch.stack([w] * len(x)) @ x,
    "cat": lambda w, x: reshaped(torch.cat([w] * len(x)), x),
    "repeat": lambda w, x: w.repeat(len(x), 1, 1, 1) @ x,
    "expand": lambda w, x: w.expand(len(x), -1, -1, -1).contiguous() @ x,
    "broadcasting (expand)": lambda w, x: w @ x,
    "tile (repeat)": lambda w, x: reshaped(w.tile(len(x), 1, 1), x),
    "of a result (stack)": lambda w, x: torch.stack([w.tanh()] * len(x)) @ x,
}
OTHERS: dict[str, Product] = {
    "einsum": lambda w, x: torch.einsum("kij,nkjm->nkim", w, x),
    "parts of one tensor": lambda w, x: torch.stack([each.repeat(2, 1, 1) for each in w.chunk(2) for _ in "abcd"]) @ x,
    "several tensors": lambda w, x: torch.stack([*[w] * (len(x) - 1), w * 1]) @ x,
    "each matrix repeated": lambda w, x: reshaped(w.repeat_interleave(len(x), 0), x.transpose(0, 1)),
    "along another dimension": lambda w, x: torch.stack([w] * len(x), 1).transpose(0, 1).contiguous() @ x,
    "dropout": lambda w, x: functional.dropout(torch.stack([w] * len(x)), 0.5) @ x,
    "changed in place": lambda w, x: torch.stack([w] * len(x)).mul_(x.mean((1, 2, 3))[:, None, None, None]) @ x,
    "a part written": lambda w, x: written(torch.stack([w] * len(x))) @ x,
    "read twice": lambda w, x: (copies := torch.stack([w] * len(x))) @ x + copies.mean(),
    "without gradient": lambda w, x: w.detach().repeat(len(x), 1, 1, 1) @ (x * w.mean()),
    "expanded after a copy": lambda w, x: torch.bmm(flat(w.mT).expand(len(x), -1, -1), x[..., 0].clone()),
    "elementwise": lambda w, x: (torch.stack([w] * len(x)) * x.transpose(2, 3)).sum(3),
    "small": lambda w, x: w[:2].repeat(len(x), 1, 1, 1) @ x[:, :2],
    "linear": lambda w, x: functional.linear(x[..., 0].repeat(2, 1, 1) * w.mean(), w[0]),
    "one matrix for all": lambda w, x: torch.bmm(w.expand(1, -1, -1, -1)[0], x[0]),
}  # fmt: skip


def flat(w: Tensor) -> Tensor:
    """Return the weights as one contiguous matrix with a column per input."""
    return w.transpose(1, 2).contiguous().view(-1, CAPSULES)


def written(copies: Tensor) -> Tensor:
    copies[0] = 0.0
    return copies


@pytest.mark.parametrize("name", COPIED)
def test_product_with_copies_of_one_tensor_is_found(name: str) -> None:
    (row,) = rows(COPIED[name])
    assert row["how"] == name.strip(")").rpartition("(")[2]
    assert (row["copies"], row["products"], row["steps"], row["is_first"]) == (SAMPLES, 1, 3, True)
    assert row["copied_bytes"] == 4 * SAMPLES * CAPSULES * ROWS * COLUMNS
    assert row["tensor"] == (None if "result" in name else "Capsules.weights")
    assert row["time_s"] > 0
    assert row["shared_s"] > 0


@pytest.mark.parametrize("name", OTHERS)
def test_other_factors_are_left_out(name: str) -> None:
    assert rows(OTHERS[name]) == []


def test_copies_may_be_the_second_factor() -> None:
    (row,) = rows(lambda w, x: x.transpose(2, 3) @ w.mT.contiguous().repeat(len(x), 1, 1, 1), dtype=torch.float64)
    assert (row["is_first"], row["copied_bytes"]) == (False, 8 * SAMPLES * CAPSULES * ROWS * COLUMNS)
    assert row["tensor"] is None


def test_both_ways_give_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for product in (COPIED["repeat"], lambda w, x: x.mT @ w.mT.contiguous().repeat(len(x), 1, 1, 1)):

        def compared(now: Products, other: Products, wanted: list[Tensor]) -> tuple[float, float]:
            with torch.no_grad():
                for each in wanted:
                    each.copy_(torch.randn_like(each))
            gradients = [torch.autograd.grad([each.square().sum() for each in way()], wanted) for way in (now, other)]
            torch.testing.assert_close(now()[0].flatten(), other()[0].flatten())
            torch.testing.assert_close(*gradients)
            return 1.0, 1.0

        monkeypatch.setattr(copied_factors, "compared_s", compared)
        assert len(rows(product)) == 1


def test_products_of_half_precision_are_left_out() -> None:
    assert rows(COPIED["stack"], dtype=torch.bfloat16) == []


def test_large_copies_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_factors, "MOST_ELEMENTS", SAMPLES * CAPSULES * ROWS * COLUMNS - 1)
    assert rows(COPIED["stack"]) == []


def test_copies_are_measured_in_a_loop(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("weights", nn.Parameter(torch.randn(CAPSULES, ROWS, COLUMNS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        weights = model(torch.ones(4)).mean() * model.get_parameter("weights")
        reshaped(weights.repeat(SAMPLES, 1, 1), torch.randn(SAMPLES, CAPSULES, COLUMNS, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (row,) = COPIED_FACTORS.of(recorded(tmp_path, step).records[0].results)
    assert row["copies"] == SAMPLES
