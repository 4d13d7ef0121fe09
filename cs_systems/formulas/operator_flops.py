"""FLOPs of one PyTorch operator by the shapes of its inputs.

A multiplication and an addition count as two. Only matrix products, convolutions and attention have a formula: the
arithmetic of other operators is limited by memory. Attention counts the whole score matrix, also where a causal mask
leaves half of it out, and its backward computes the scores again: the convention of PyTorch's FlopCounterMode.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]
LARGEST = 1 << 62  # FLOPs of one call; shapes that give more are damaged


class Work(NamedTuple):
    """FLOPs of one call, and the formula in the sizes of the inputs."""

    flops: int
    formula: str


def operator_work(name: str, shapes: Sequence[object], arguments: Sequence[str] = ()) -> Work | None:
    """Return the work of one call; None where no formula is known, or the inputs do not fit it.

    Args:
        name: The operator, as `aten::mm`.
        shapes: The shape of each input; () for a number or an input that is no tensor.
        arguments: The values of the other inputs as texts, "" for a tensor. Convolutions need them.
    """
    if (rule := FORMULAS.get(name)) is None:
        return None
    try:
        flops = rule.flops([_shape(one) for one in shapes], arguments)
    except (IndexError, ValueError):
        return None
    return Work(flops, rule.formula) if flops < LARGEST else None


def takes_arguments(name: str) -> bool:
    """Return whether an operator's FLOPs depend on inputs other than tensors."""
    return name in FORMULAS and FORMULAS[name].by_arguments


Count = Callable[[Sequence[Shape], Sequence[str]], int]


class _Rule(NamedTuple):
    formula: str
    flops: Count
    by_arguments: bool = False


def _shape(value: object) -> Shape:
    """Return the shape of one tensor; raise ValueError for a list of tensors or anything else."""
    if isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value):
        return value
    raise ValueError


def _matmul(left: Shape, right: Shape) -> int:
    """Return the FLOPs of `torch.matmul`; leading dimensions are broadcast. Raises ValueError if the shapes differ."""
    if not left or not right:
        raise ValueError
    rows, inner = (1, *left)[-2:]
    inner_right, columns = right[-2:] if len(right) > 1 else (right[0], 1)
    if inner != inner_right:
        raise ValueError
    return 2 * math.prod(_broadcast(left[:-2], right[:-2])) * rows * inner * columns


def _broadcast(left: Shape, right: Shape) -> Shape:
    longest = max(len(left), len(right))
    pairs = zip((1,) * (longest - len(left)) + left, (1,) * (longest - len(right)) + right, strict=True)
    found = []
    for a, b in pairs:
        if a != b and 1 not in (a, b):
            raise ValueError
        found.append(b if a == 1 else a)
    return tuple(found)


def _product(first: int, shapes: Sequence[Shape], arguments: Sequence[str]) -> int:
    return _matmul(shapes[first], shapes[first + 1])


def _linear(shapes: Sequence[Shape], arguments: Sequence[str]) -> int:
    inputs, weight = shapes[0], shapes[1]
    if not inputs or not weight or inputs[-1] != weight[-1]:
        raise ValueError
    return 2 * math.prod(inputs) * math.prod(weight[:-1])


def _attention(first: int, of_keys: int, of_values: int, shapes: Sequence[Shape], arguments: Sequence[str]) -> int:
    """Return the FLOPs for inputs (batch, heads, length, head dimension), or without one or both of the first two.

    Args:
        first: The index of the query, before key and value.
        of_keys: Matrix products of the scores' size with the head dimension of query and key.
        of_values: The same with that of the value.
        shapes: The shape of each input.
        arguments: Not used.
    """
    query, key, value = shapes[first : first + 3]
    (queries, d_head), (keys, d_key), (values, d_value) = (one[-2:] for one in (query, key, value))
    if d_head != d_key or keys != values:
        raise ValueError
    scores = math.prod(query[:-2]) * queries * keys
    return 2 * scores * (of_keys * d_head + of_values * d_value)


def _flash(first: int, of_keys: int, of_values: int, shapes: Sequence[Shape], arguments: Sequence[str]) -> int:
    """Return the FLOPs for inputs (batch, length, heads, head dimension), as the package flash-attn takes them."""
    query, key, value = shapes[first : first + 3]
    swapped = [(batch, heads, length, d) for batch, length, heads, d in (query, key, value)]
    return _attention(0, of_keys, of_values, swapped, arguments)


def _numbers(text: str, count: int) -> list[int]:
    """Return the numbers of an argument such as `[2, 2]`, where one stands for all."""
    found = [int(number) for number in re.findall(r"-?\d+", text)]
    if len(found) not in (1, count):
        raise ValueError
    return found * (count // len(found))


def _convolution(shapes: Sequence[Shape], arguments: Sequence[str], transposed: bool = False) -> int:
    inputs, weight = shapes[0], shapes[1]
    sizes = len(weight) - 2
    if sizes < 1 or len(inputs) not in (sizes + 1, sizes + 2):
        raise ValueError
    batch = inputs[0] if len(inputs) == len(weight) else 1
    if transposed:  # each element of the input meets the whole kernel
        return 2 * batch * math.prod(inputs[-sizes - 1 :]) * math.prod(weight[1:])
    stride, padding, dilation = (_numbers(text, sizes) for text in arguments[3:6])
    extents = zip(inputs[-sizes:], weight[2:], stride, padding, dilation, strict=True)
    outputs = [(size + 2 * pad - spread * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, spread in extents]
    if min(outputs) < 1:
        raise ValueError
    return 2 * batch * weight[0] * math.prod(outputs) * math.prod(weight[1:])


def _any_convolution(shapes: Sequence[Shape], arguments: Sequence[str]) -> int:
    return _convolution(shapes, arguments, {"True": True, "False": False}.get(arguments[6], False))


def _convolution_backward(shapes: Sequence[Shape], arguments: Sequence[str]) -> int:
    gradient, inputs, weight = shapes[:3]
    transposed, computed = arguments[7] == "True", re.findall("True|False", arguments[10])[:2]
    if not weight or not gradient or len(computed) < 2:
        raise ValueError
    return 2 * math.prod(inputs if transposed else gradient) * math.prod(weight[1:]) * computed.count("True")


_PRODUCT, _BATCHED = "2·m·k·n", "2·b·m·k·n"
_CONVOLUTION = "2·batch·channels out·positions out·channels in/groups·kernel"
_TRANSPOSED = "2·batch·channels in·positions in·channels out/groups·kernel"
_FORWARD, _BACKWARD = "2·b·h·q·k·(d + d_v)", "2·b·h·q·k·(3·d + 2·d_v)"
_SDPA = ("flash_attention", "efficient_attention", "cudnn_attention")

FORMULAS: dict[str, _Rule] = {
    **{f"aten::{name}": _Rule(_PRODUCT, functools.partial(_product, 0)) for name in ("mm", "_scaled_mm", "_int_mm")},
    **{f"aten::{name}": _Rule(_PRODUCT, functools.partial(_product, 1)) for name in ("addmm", "_addmm_activation")},
    "aten::bmm": _Rule(_BATCHED, functools.partial(_product, 0)),
    "aten::baddbmm": _Rule(_BATCHED, functools.partial(_product, 1)),
    "aten::addbmm": _Rule(_BATCHED, functools.partial(_product, 1)),
    "aten::matmul": _Rule(_BATCHED, functools.partial(_product, 0)),
    "aten::linear": _Rule("2·tokens·in·out", _linear),
    "aten::mv": _Rule("2·m·k", functools.partial(_product, 0)),
    "aten::addmv": _Rule("2·m·k", functools.partial(_product, 1)),
    "aten::dot": _Rule("2·k", functools.partial(_product, 0)),
    **{f"aten::conv{n}d": _Rule(_CONVOLUTION, _convolution, by_arguments=True) for n in (1, 2, 3)},
    **{f"aten::{name}": _Rule(_CONVOLUTION, _any_convolution, True) for name in ("convolution", "_convolution")},
    **{
        f"aten::conv_transpose{n}d": _Rule(_TRANSPOSED, functools.partial(_convolution, transposed=True))
        for n in (1, 2, 3)
    },
    "aten::convolution_backward": _Rule(f"{_CONVOLUTION}, once a gradient", _convolution_backward, by_arguments=True),
    "aten::scaled_dot_product_attention": _Rule(_FORWARD, functools.partial(_attention, 0, 1, 1)),
    "aten::_scaled_dot_product_attention_math": _Rule(_FORWARD, functools.partial(_attention, 0, 1, 1)),
    **{
        f"aten::_scaled_dot_product_{name}": _Rule(_FORWARD, functools.partial(_attention, 0, 1, 1))
        for name in (*_SDPA, "flash_attention_for_cpu", "fused_attention_overrideable")
    },
    **{
        f"aten::_scaled_dot_product_{name}_backward": _Rule(_BACKWARD, functools.partial(_attention, 1, 3, 2))
        for name in (*_SDPA, "flash_attention_for_cpu", "fused_attention_overrideable")
    },
    "flash_attn::_flash_attn_forward": _Rule(_FORWARD, functools.partial(_flash, 0, 1, 1)),
    "flash_attn::_flash_attn_backward": _Rule(_BACKWARD, functools.partial(_flash, 1, 3, 2)),
}
