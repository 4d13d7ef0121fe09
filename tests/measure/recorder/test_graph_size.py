"""Size of a forward pass by its graph: operators, and a bound on their arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cs_systems.measure.recorder.graph_size import (
    ELEMENTS_PER_S,
    FLOPS_PER_S,
    costs_by_owners,
    graph_size,
    largest_broadcast,
    multiplied,
    weight_costs,
)


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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_nodes_of_a_recurrent_module_are_left_out(kind: type[nn.RNNBase]) -> None:
    """It is one operator for the program, and often a few nodes per time step for autograd."""
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
    states = model(torch.ones(60, 1, 4))[0]
    for _ in range(20):
        states = states.tanh()
    found = graph_size(states.sum(), [model])
    assert found is not None
    assert found.has_recurrent
    assert 22 <= found.operators < 40, "the product, the tanh and the sum, with the module's last few nodes"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"batch_first": True}])
def test_recurrent_module_of_single_steps_counts_like_other_operators(kind: type[nn.RNNBase], options: Any) -> None:
    """A loop over time steps in the program is not one operator for it, as in a decoder with attention."""
    model = kind(4, 4, **options)
    inputs, state, outputs = torch.ones(1, 1, 4), None, []
    for _ in range(60):
        inputs, state = model(inputs, state)
        outputs.append(inputs.tanh())
    found = graph_size(torch.cat(outputs).sum(), [model])
    assert found is not None
    assert not found.has_recurrent
    assert found.operators >= 60 * (1 + model.num_layers)
    products = 60 * model.num_layers * 2 * 4 * 8 * (4 if kind is nn.LSTM else 1)
    assert found.arithmetic_s >= products / FLOPS_PER_S
    layers = nn.ModuleList([model, kind(4, 4)])
    in_sequence = graph_size(layers[1](torch.cat(outputs))[0].sum(), [layers])
    assert in_sequence is not None
    assert in_sequence.has_recurrent


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_module_over_a_sequence_is_left_out_under_autocast_too(kind: type[nn.RNNBase]) -> None:
    """Autocast casts a weight once, and the products use the cast."""
    model = kind(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        states = model(torch.ones(60, 1, 4))[0]
    found = graph_size(states.sum(), [model])
    assert found is not None
    assert found.has_recurrent


def test_cost_is_that_of_the_owners_below_an_operator() -> None:
    """Operators that lead to the generator alone are the share that detaching its result would save."""
    generator, critic = nn.Linear(64, 64), nn.Linear(64, 1)
    owners = {id(p): number for number, model in enumerate((generator, critic)) for p in model.parameters()}
    fake = generator(torch.ones(8, 64))
    costs = costs_by_owners(critic(fake).sum(), owners)
    assert costs.keys() == {frozenset({0}), frozenset({0, 1})}
    assert costs[frozenset({0})] == pytest.approx(8 * 64 / ELEMENTS_PER_S + 2 * 8 * 64 * 64 / FLOPS_PER_S)
    assert costs_by_owners(critic(fake.detach()).sum(), owners).keys() == {frozenset({1})}


def test_cost_of_weights_on_the_way_is_that_of_products_with_others_below_them() -> None:
    generator, critic = nn.Linear(64, 64), nn.Linear(64, 1)
    owners = {id(p): number for number, model in enumerate((generator, critic)) for p in model.parameters()}
    fake = generator(torch.ones(8, 64))
    costs, total_s = weight_costs(critic(fake), owners)
    critic_s = 8 * 1 / ELEMENTS_PER_S + 2 * 8 * 64 / FLOPS_PER_S
    assert costs == {(1, frozenset({0})): pytest.approx(critic_s)}
    assert total_s == pytest.approx(2 * critic_s + 8 * 64 / ELEMENTS_PER_S + 2 * 8 * 64 * 64 / FLOPS_PER_S)
    assert weight_costs(critic(fake.detach()), owners)[0] == {}
    assert weight_costs(critic.requires_grad_(False)(generator(torch.ones(8, 64))), owners)[0] == {}


def test_operands_of_products_are_used_as_a_whole_and_looked_up_rows_are_not() -> None:
    tied, cast, seen, some = (nn.Embedding(6, 4).weight for _ in range(4))
    rows = functional.embedding(torch.tensor([1, 2]), some) + functional.embedding(torch.tensor([3, 4]), tied)
    products = (rows @ tied.T, rows.double() @ cast.double().T[None], functional.linear(rows, seen.view(6, 4)))
    loss = sum(each.sum() for each in products) + some.square().sum() + (rows @ some[:2].T).sum()
    assert multiplied(loss) == {id(tied), id(cast), id(seen)}


def test_large_broadcast_that_is_summed_up_is_found_and_no_other() -> None:
    a, b = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
    assert largest_broadcast((a[:, None] - b[None]).pow(2).sum(-1).exp().sum()) == ((64, 64, 64), 8192, 4096)
    assert largest_broadcast(torch.cdist(a, b).sum()) is None
    assert largest_broadcast((a[:, None] - b[None]).exp()) is None, "it is the result"
    layer = nn.Linear(2, 4096)
    assert largest_broadcast(layer(torch.ones(64, 2)).sum()) is None, "a product is no broadcast"
