"""Calls of nn.MultiheadAttention with weights that nothing reads, and calls with weights that something may read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import ATTENTION_WEIGHTS, AttentionWeightsRow
from cs_systems.measure.recorder import attention_weights
from cs_systems.measure.recorder.operator_times import compared_s
from tests.measure.recorder.test_training import recorded

LENGTH, WIDTH, HEADS = 64, 16, 4
Attend = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, attend: Attend, **kinds: Any) -> None:
        super().__init__()
        self.attend, self.weights = attend, torch.zeros(())
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self, x)


def rows(tmp_path: Path, attend: Attend, **kinds: Any) -> list[AttentionWeightsRow]:
    """Return what is found in a loop with a model that calls its attention in this way."""
    torch.manual_seed(0)
    model = Net(attend, **kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.randn(8, LENGTH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    recorder = recorded(tmp_path, step, 25)
    assert all(each.failure is None for each in recorder._observers._every)
    return [*ATTENTION_WEIGHTS.of(recorder.records[0].results)]


def underscore(net: Net, x: Tensor) -> Tensor:
    mixed, _ = net.attention(x, x, x)
    return x + mixed  # type: ignore[no-any-return]


def never_loaded(net: Net, x: Tensor) -> Tensor:
    mixed, weights = net.attention(  # noqa: RUF059
        x,
        x,
        x,
        need_weights=True,
    )
    return x + mixed  # type: ignore[no-any-return]


def with_masks(net: Net, x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.zeros(len(x), LENGTH, dtype=torch.bool)
    return net.attention(x, x, x, padding, True, mask, average_attn_weights=False)[0]  # type: ignore[no-any-return]


def across(net: Net, x: Tensor) -> Tensor:
    return net.attention(x, x.tanh(), x.tanh())[0]  # type: ignore[no-any-return]


UNREAD: list[Attend] = [underscore, never_loaded, with_masks, across]


def without(net: Net, x: Tensor) -> Tensor:
    return net.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def both(net: Net, x: Tensor) -> Tensor:
    found = net.attention(x, x, x)
    return found[0]  # type: ignore[no-any-return]


def kept(net: Net, x: Tensor) -> Tensor:
    mixed, net.weights = net.attention(x, x, x)
    return mixed  # type: ignore[no-any-return]


def in_the_loss(net: Net, x: Tensor) -> Tensor:
    mixed, weights = net.attention(x, x, x)
    return mixed + weights.mean()  # type: ignore[no-any-return]


def read_by_an_inner_function(net: Net, x: Tensor) -> Tensor:
    mixed, weights = net.attention(x, x, x)

    def mean() -> Tensor:
        return weights.mean()  # type: ignore[no-any-return]

    return mixed + mean()  # type: ignore[no-any-return]


def by_locals(net: Net, x: Tensor) -> Tensor:
    mixed, weights = net.attention(x, x, x)
    return mixed + locals()["weights"].mean()  # type: ignore[no-any-return]


def outside_of_the_function(net: Net, x: Tensor) -> Tensor:
    global shown
    mixed, shown = net.attention(x, x, x)
    return mixed  # type: ignore[no-any-return]


def second(net: Net, x: Tensor) -> Tensor:
    return x * net.attention(x, x, x)[1].mean()  # type: ignore[no-any-return]


def added_to(net: Net, x: Tensor) -> Tensor:
    mixed, weights = net.attention(x, x, x)
    weights += mixed.mean()
    return mixed  # type: ignore[no-any-return]


def starred(net: Net, x: Tensor) -> Tensor:
    mixed, *_ = net.attention(x, x, x)
    return mixed  # type: ignore[no-any-return]


def by_another_function(net: Net, x: Tensor) -> Tensor:
    (mixed, _), _ = (lambda: net.attention(x, x, x))(), None
    return mixed  # type: ignore[no-any-return]


def under_autocast(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.attention(x, x, x)[0].float()  # type: ignore[no-any-return]


def without_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        mixed, _ = net.attention(x, x, x)
    return mixed * next(net.parameters()).mean()  # type: ignore[no-any-return]


def short(net: Net, x: Tensor) -> Tensor:
    return net.attention(x[:, :2], x, x)[0]  # type: ignore[no-any-return]


OTHERS: list[Attend] = [
    without, both, kept, in_the_loss, read_by_an_inner_function, by_locals, outside_of_the_function, second, added_to,
    starred,    by_another_function, under_autocast, without_gradients, short,
]  # fmt: skip
shown: Any = None


@pytest.mark.parametrize("attend", UNREAD)
def test_weights_that_nothing_reads_are_found(attend: Any, tmp_path: Path) -> None:
    (row,) = rows(tmp_path, attend)
    assert (row["module"], row["function"], row["calls"]) == ("Net.attention", attend.__name__, 1)
    assert row["place"].startswith("test_attention_weights.py:")
    assert row["time_s"] > 0
    assert row["fused_s"] > 0


@pytest.mark.parametrize("attend", OTHERS)
def test_weights_that_may_be_read_are_left_out(attend: Attend, tmp_path: Path) -> None:
    assert rows(tmp_path, attend) == []


@pytest.mark.parametrize("kinds", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"dtype": torch.float64}])
def test_unusual_attentions_are_left_out(kinds: dict[str, Any], tmp_path: Path) -> None:
    def attend(net: Net, x: Tensor) -> Tensor:
        return net.attention(*[x.to(next(net.parameters()).dtype)] * 3)[0]  # type: ignore[no-any-return]

    assert rows(tmp_path, attend, **kinds) == []
    assert len(rows(tmp_path, attend, dropout=0.1, bias=False)) == 1


def test_hooks_may_read_the_weights(tmp_path: Path) -> None:
    def attend(net: Net, x: Tensor) -> Tensor:
        if not net.attention._forward_hooks:
            net.attention.register_forward_hook(lambda *_: None)
        return net.attention(x, x, x)[0]  # type: ignore[no-any-return]

    assert rows(tmp_path, attend) == []


def read_by_a_wrapper(*given: Any, **named: Any) -> Any:
    mixed, weights = attention_weights._PLAIN(*given, **named)
    return mixed * weights.mean(), weights


@pytest.mark.parametrize("of_all", [False, True])
def test_wrappers_of_forward_may_read_the_weights(
    of_all: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def attend(net: Net, x: Tensor) -> Tensor:
        if not of_all:
            net.attention.forward = partial(read_by_a_wrapper, net.attention)  # type: ignore[method-assign]
        return net.attention(x, x, x)[0]  # type: ignore[no-any-return]

    if of_all:
        monkeypatch.setattr(nn.MultiheadAttention, "forward", read_by_a_wrapper)
    assert rows(tmp_path, attend) == []


def test_hooks_before_forward_may_ask_for_other_results(tmp_path: Path) -> None:
    def attend(net: Net, x: Tensor) -> Tensor:
        if not net.attention._forward_pre_hooks:
            net.attention.register_forward_pre_hook(
                lambda _, given, named: (given, {**named, "need_weights": False}), with_kwargs=True
            )
        return net.attention(x, x, x)[0]  # type: ignore[no-any-return]

    assert rows(tmp_path, attend) == []


def test_timing_shows_hooks_of_the_program_no_tensor() -> None:
    packed = list[Tensor]()
    factor = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: factor):
        compared_s(lambda: [factor * factor], lambda: [factor.square()], [factor])
    assert packed == []


def test_timing_leaves_the_random_numbers_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed = attention_weights._times_s
    states = list[Tensor]()

    def seen(call: Any) -> tuple[float, float]:
        states.append(torch.get_rng_state())
        found = timed(call)
        states.append(torch.get_rng_state())
        return found

    monkeypatch.setattr(attention_weights, "_times_s", seen)
    assert len(rows(tmp_path, underscore, dropout=0.5)) == 1
    assert torch.equal(*states)
