"""Size of a forward pass by its graph: operators, and a bound on their arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cs_systems.measure.recorder.graph_size import ELEMENTS_PER_S, FLOPS_PER_S, graph_size


def test_operators_of_a_chain_are_counted_without_views_and_leaves() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
    found = graph_size(model(torch.ones(2, 4)).sum(), [model])
    assert found is not None
    assert found.operators == 11  # five products, five activations, the sum
    assert found.arithmetic_s == pytest.approx((10 * 8 + 1) / ELEMENTS_PER_S + 5 * 2 * 8 * 4 / FLOPS_PER_S)


def test_graph_is_neither_run_nor_freed() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    assert graph_size((loss,), []) == graph_size((loss,), [])
    assert weight.grad is None
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_recurrent_module_of_torch_has_no_size() -> None:
    """It is one operator for the program, and a node per time step for autograd."""
    model = nn.LSTM(4, 4)
    assert graph_size(model(torch.ones(9, 1, 4))[0].sum(), [model]) is None
