"""FLOPs of one PyTorch operator by the shapes of its inputs.

A multiplication and an addition count as two. Only matrix products, convolutions and attention have a formula, because
other operators are limited by memory, not arithmetic. A fused attention counts as in `cost`: its visible scores, causal
or in a window, and twice as much in backward. If a trace does not show which scores a mask hides, all scores count. The
products of an unfused attention count like other matrix products.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cs_systems.core.shapes import causal_offset
from cs_systems.formulas.cost import twice_credited_scores

Shape = tuple[int, ...]
LARGEST = 1 << 62  # limit of FLOPs of one call; shapes that give more are damaged


class Work(NamedTuple):
    """Model FLOPs of one call, and the formula in the sizes of the inputs."""

    flops: int
    formula: str


def operator_work(name: str, shapes: Sequence[object], arguments: Sequence[str] = ()) -> Work | None:
    """Return the work of one call; None if no formula is known, or the inputs do not fit it.

    Args:
        name: The operator, such as `aten::mm`.
        shapes: The shape of each input; () for a number or another input that is not a tensor.
        arguments: The values of the other inputs as texts, "" for a tensor. Convolutions need them, and attention to
            know whether it is causal.
    """
    if (rule := FORMULAS.get(name)) is None:
        return None
    try:
        found = rule.flops([_shape(one) for one in shapes], arguments)
    except (IndexError, ValueError):
        return None
    work = found if isinstance(found, Work) else Work(found, rule.formula)
    return work if work.flops < LARGEST else None


def takes_arguments(name: str) -> bool:
    """Return whether an operator's FLOPs depend on inputs other than tensors."""
    return name in FORMULAS and FORMULAS[name].by_arguments


Count = Callable[[Sequence[Shape], Sequence[str]], int | Work]


class _Attention(NamedTuple):
    """Indices of a fused attention's inputs that decide which scores are visible; None: it has no such input."""

    causal: int
    mask: int | None = None
    window: int | None = None  # number of visible keys before the diagonal; the next input has the number after it
    starts: int | None = None  # start positions of packed sequences
    query: int = 0  # index of the query; key and value follow
    backward: bool = False
    by_position: bool = False  # (batch, length, heads, d_head) instead of (batch, heads, length, d_head)
    align: str = "upper_left"  # alignment of the diagonal if the numbers of queries and keys differ


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


def _attention(call: _Attention, shapes: Sequence[Shape], arguments: Sequence[str]) -> Work:
    """Return the work for inputs (batch, heads, length, head dimension), or without one or both of the first two.

    Raises ValueError if the inputs do not fit, and for packed sequences, because a trace lacks their lengths.
    """
    query, key, value = shapes[call.query : call.query + 3]
    if call.by_position:
        query, key, value = ((*one[:-3], one[-2], one[-3], one[-1]) for one in (query, key, value))
    (queries, d_head), (keys, d_key), (values, d_value) = (one[-2:] for one in (query, key, value))
    if d_head != d_key or keys != values or _at(shapes, call.starts, ()):
        raise ValueError
    causal = {"True": True, "False": False}.get(_at(arguments, call.causal, ""))
    before, after = (_bound(_at(arguments, place, "")) for place in _sides(call))
    after = 0 if causal else after
    offset = None if after is None else causal_offset(queries, keys, call.align) + after
    window = None if before is None or after is None else before + after + 1
    mask = _at(shapes, call.mask, ())
    may_hide = (len(mask) > 1 and 0 not in mask) or causal is None or (before is not None and after is None)
    shown = twice_credited_scores(queries, keys, offset, window) * (2 if call.backward else 1)
    hides = MAY_HIDE if may_hide else "" if offset is None else ", causal" if window is None else ", in a window"
    formula = f"{_BACKWARD if call.backward else _FORWARD}{hides}"
    return Work(math.prod(query[:-2]) * shown * (d_head + d_value), formula)


def _at(values: Sequence[Any], place: int | None, default: Any) -> Any:
    return values[place] if place is not None and place < len(values) else default


def _sides(call: _Attention) -> tuple[int | None, int | None]:
    return call.window, None if call.window is None else call.window + 1


def _bound(text: str) -> int | None:
    """Return the size of one side of a window; None if it is unlimited."""
    return int(text) if text.isdecimal() else None


def _numbers(text: str, count: int) -> list[int]:
    """Return the numbers of an argument such as `[2, 2]`; a single number stands for all dimensions."""
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
    if transposed:  # each element of the input is multiplied by the whole kernel
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
# suffix of the formula if all scores are counted because the mask is unknown
MAY_HIDE = ", a mask may hide some"
_FORWARD, _BACKWARD = "2·b·h·q·k·(d + d_v)", "4·b·h·q·k·(d + d_v)"


_SDPA = "aten::_scaled_dot_product_"
_LOWER = "lower_right"
_CALLS = {
    "aten::scaled_dot_product_attention": _Attention(5, mask=3),
    "aten::_scaled_dot_product_attention_math": _Attention(5, mask=3),
    f"{_SDPA}flash_attention": _Attention(4, align=_LOWER),
    f"{_SDPA}flash_attention_backward": _Attention(11, query=1, backward=True, align=_LOWER),
    f"{_SDPA}flash_attention_for_cpu": _Attention(4, mask=5),
    f"{_SDPA}flash_attention_for_cpu_backward": _Attention(7, mask=8, query=1, backward=True),
    f"{_SDPA}efficient_attention": _Attention(6, mask=3),
    f"{_SDPA}efficient_attention_backward": _Attention(11, mask=4, query=1, backward=True),
    f"{_SDPA}cudnn_attention": _Attention(6, mask=3),
    f"{_SDPA}cudnn_attention_backward": _Attention(14, mask=8, query=1, backward=True),
    f"{_SDPA}fused_attention_overrideable": _Attention(5, mask=3),
    f"{_SDPA}fused_attention_overrideable_backward": _Attention(13, mask=4, query=1, backward=True),
    "aten::_flash_attention_forward": _Attention(8, window=11, starts=3, by_position=True, align=_LOWER),
    "aten::_flash_attention_backward": _Attention(
        11, window=15, starts=6, query=1, backward=True, by_position=True, align=_LOWER
    ),
    "flash_attn::_flash_attn_forward": _Attention(5, window=6, by_position=True, align=_LOWER),
    "flash_attn::_flash_attn_backward": _Attention(
        11, window=12, query=1, backward=True, by_position=True, align=_LOWER
    ),
}

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
    **{name: _Rule(_FORWARD, functools.partial(_attention, call), True) for name, call in _CALLS.items()},
}
