"""Layers of attention: some drop the weights that nn.MultiheadAttention returns, others may read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.optim import AdamW
from torch.overrides import TorchFunctionMode

Step = Callable[[], None]
LENGTH, WIDTH, HEADS = 256, 32, 8


class Mixing(nn.Module):
    """Layer of attention, called by a function."""

    def __init__(self, call: Callable[[Mixing, Tensor], Any], attention: nn.Module | None = None):
        super().__init__()
        self.attention = attention or nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.call, self.calls, self.noted = call, 0, list[Any]()

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        return self.call(self, inputs)


def mixing(
    call: Callable[[Mixing, Tensor], Any],
    prepare: Callable[[Mixing], object] = lambda _: None,
    attention: Callable[[], nn.Module | None] = lambda: None,
    train: Callable[[Mixing, Tensor], Tensor] = lambda model, inputs: (model(inputs) - 1).square().mean(),
) -> Step:
    """Return a step of a layer of attention. prepare: is called with the model before the loop."""
    torch.manual_seed(0)
    model = Mixing(call, attention())
    prepare(model)
    optimizer, inputs = AdamW(model.parameters()), torch.randn(4, LENGTH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        train(model, inputs).backward()
        optimizer.step()

    return step


def dropped(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, _ = model.attention(inputs, inputs, inputs)
    return mixed  # type: ignore[no-any-return]


def dropped_with_a_mask(model: Mixing, inputs: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return inputs + model.attention(inputs, inputs, inputs, attn_mask=mask)[0]  # type: ignore[no-any-return]


def dropped_of_another_sequence(model: Mixing, inputs: Tensor) -> Tensor:
    memory = inputs.flip(1)
    mixed, _unread = model.attention(inputs, memory, value=memory, need_weights=True)
    return mixed  # type: ignore[no-any-return]


FAULTS: dict[str, tuple[Callable[[], Step], str]] = {
    "dropped_attention_weights": (lambda: mixing(dropped), "attention-weights"),
    "dropped_attention_weights_with_a_mask": (lambda: mixing(dropped_with_a_mask), "attention-weights"),
    "dropped_weights_of_cross_attention": (lambda: mixing(dropped_of_another_sequence), "attention-weights"),
}


def fused(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, _ = model.attention(inputs, inputs, inputs, need_weights=False)
    return mixed  # type: ignore[no-any-return]


def in_the_loss(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, weights = model.attention(inputs, inputs, inputs)
    return mixed + weights.square().mean()  # type: ignore[no-any-return]


def with_their_entropy_logged(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, weights = model.attention(inputs, inputs, inputs)
    model.noted.append(-(weights * weights.clamp(min=1e-9).log()).sum(-1).mean().item())
    return mixed  # type: ignore[no-any-return]


def plotted_now_and_then(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, weights = model.attention(inputs, inputs, inputs)
    if model.calls % 1000 == 999:
        model.noted.append(weights.detach())
    return mixed  # type: ignore[no-any-return]


def kept(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, weights = model.attention(inputs, inputs, inputs)
    model.noted = [*model.noted[-2:], weights.detach()]
    return mixed  # type: ignore[no-any-return]


def kept_whole(model: Mixing, inputs: Tensor) -> Tensor:
    model.noted = [model.attention(inputs, inputs, inputs)]
    return model.noted[0][0]  # type: ignore[no-any-return]


def returned(model: Mixing, inputs: Tensor) -> tuple[Tensor, Tensor]:
    mixed, weights = model.attention(inputs, inputs, inputs)
    return mixed, weights


def without_the_returned(model: Mixing, inputs: Tensor) -> Tensor:
    """Return a loss, with the weights dropped here; an evaluation after the loop would read them."""
    mixed, _ = model(inputs)
    return (mixed - 1).square().mean()  # type: ignore[no-any-return]


def read_by_an_inner_function(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, weights = model.attention(inputs, inputs, inputs)
    model.noted = [lambda: weights.max()]
    return mixed  # type: ignore[no-any-return]


def in_all_variables(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, weights = model.attention(inputs, inputs, inputs)
    model.noted = [locals()]
    return mixed  # type: ignore[no-any-return]


def with_pairs_in_a_list(model: Mixing, inputs: Tensor) -> Tensor:
    first, second = map(model.attention, *[inputs.chunk(2)] * 3)
    return torch.cat([first[0] + first[1].mean(), second[0]])


def with_a_mode(model: Mixing, inputs: Tensor) -> Tensor:
    with Reading(model):
        return dropped(model, inputs)


def with_packed_tensors(model: Mixing, inputs: Tensor) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        model.noted = [tensor.detach()]
        return tensor

    with saved_tensors_hooks(pack, lambda packed: packed):
        return dropped(model, inputs)


class Reading(TorchFunctionMode):
    """Mode that keeps the result of softmax."""

    def __init__(self, model: Mixing):
        super().__init__()
        self.model = model

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "softmax" in getattr(function, "__name__", ""):
            self.model.noted = [result.detach()]
        return result


class Remembering(nn.MultiheadAttention):
    """Attention that keeps its weights."""

    def forward(self, *args: Any, **named: Any) -> Any:
        mixed, self.weights = super().forward(*args, **named)
        return mixed, self.weights


def noting(model: Mixing, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also notes its results."""

    def noted(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        model.noted = [result]
        return result

    return noted


def with_a_forward_of_its_own(model: Mixing) -> None:
    model.attention.forward = noting(model, model.attention.forward)


def note(model: Mixing, module: nn.Module, _: Any, result: Any) -> None:
    if isinstance(module, nn.MultiheadAttention):
        model.noted = [result[1].detach()]


def with_second_derivatives(model: Mixing, inputs: Tensor) -> Tensor:
    points = inputs.detach().requires_grad_()
    result = model(points)
    (slope,) = torch.autograd.grad(result.sum(), points, create_graph=True)
    return result.square().mean() + slope.square().mean()  # type: ignore[no-any-return]


def with_curvature(model: Mixing, inputs: Tensor) -> Tensor:
    loss = model(inputs).square().mean()
    loss.backward(create_graph=True)
    every = [each for each in model.parameters() if each.grad is not None]
    slopes = [each.grad for each in every]
    for each in every:
        each.grad = None
    return sum(slope.square().sum() for slope in slopes if slope is not None)  # type: ignore[return-value]


SOUND: dict[str, Callable[[], Step]] = {
    "fused_attention": lambda: mixing(fused),
    "attention_in_a_layer_of_torch": lambda: mixing(
        lambda model, inputs: model.attention(inputs),
        attention=lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True),
    ),
    "attention_weights_in_the_loss": lambda: mixing(in_the_loss),
    "entropy_of_attention_weights_logged": lambda: mixing(with_their_entropy_logged),
    "attention_weights_plotted_now_and_then": lambda: mixing(plotted_now_and_then),
    "kept_attention_weights": lambda: mixing(kept),
    "kept_result_of_attention": lambda: mixing(kept_whole),
    "returned_attention_weights": lambda: mixing(returned, train=without_the_returned),
    "attention_weights_read_by_an_inner_function": lambda: mixing(read_by_an_inner_function),
    "attention_weights_in_all_variables": lambda: mixing(in_all_variables),
    "results_of_attention_in_a_list": lambda: mixing(with_pairs_in_a_list),
    "attention_weights_read_by_a_mode": lambda: mixing(with_a_mode),
    "attention_weights_that_are_packed": lambda: mixing(with_packed_tensors),
    "attention_weights_read_by_a_subclass": lambda: mixing(
        dropped, attention=lambda: Remembering(WIDTH, HEADS, batch_first=True)
    ),
    "attention_weights_read_by_a_hook": lambda: mixing(
        dropped, lambda model: model.attention.register_forward_hook(partial(note, model))
    ),
    "attention_weights_read_by_a_hook_on_gradients": lambda: mixing(
        lambda model, inputs: dropped(model, inputs + model.attention.out_proj.bias),
        lambda model: model.attention.register_full_backward_hook(lambda *given: model.noted.append(given[2])),
    ),
    "attention_weights_read_by_a_forward_of_its_own": lambda: mixing(dropped, with_a_forward_of_its_own),
    "attention_with_second_derivatives": lambda: mixing(dropped, train=with_second_derivatives),
}


def read_by_a_replaced_function(owner: Any, name: str, patch: pytest.MonkeyPatch) -> Step:
    """Return a step of attention, with one function of torch replaced by one that notes its results."""
    return mixing(dropped, lambda model: patch.setattr(owner, name, noting(model, getattr(owner, name))))


REPLACED = [(functional, "multi_head_attention_forward"), (functional, "softmax"), (torch, "bmm"),
            (Tensor, "softmax"), (nn.Module, "__call__"), (nn.MultiheadAttention, "forward")]  # fmt: skip
