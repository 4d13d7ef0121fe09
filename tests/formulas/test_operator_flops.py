"""FLOPs of operators by the shapes of their inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

from cs_systems.formulas.cost import twice_credited_scores
from cs_systems.formulas.operator_flops import FORMULAS, MAY_HIDE, operator_work

Q, K, V = (2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 12)  # grouped queries, a value of another head dimension


def flops(name: str, shapes: tuple[Any, ...], *arguments: str) -> int | None:
    work = operator_work(name, shapes, arguments)
    return None if work is None else work.flops


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("mm", ((3, 5), (5, 7))), ("addmm", ((7,), (3, 5), (5, 7), (), ())), ("bmm", ((2, 3, 5), (2, 5, 7)))],
)
def test_matrix_products_count_as_in_pytorch(name: str, shapes: tuple[Any, ...]) -> None:
    expected = flop_registry[getattr(torch.ops.aten, name)](*(torch.empty(s, device="meta") for s in shapes if s))
    assert flops(f"aten::{name}", shapes) == expected


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::linear", ((2, 3, 5), (7, 5), (7,)), 2 * 6 * 5 * 7),
        ("aten::matmul", ((4, 1, 3, 5), (6, 5, 7)), 2 * 24 * 3 * 5 * 7),
        ("aten::matmul", ((5,), (5,)), 2 * 5),
        ("aten::baddbmm", ((2, 3, 7), (2, 3, 5), (2, 5, 7), (), ()), 2 * 2 * 3 * 5 * 7),
        ("aten::mv", ((3, 5), (5,)), 2 * 3 * 5),
        ("flash_attn::_flash_attn_forward", ((2, 5, 8, 16), (2, 7, 4, 16), (2, 7, 4, 16)), 4 * 2 * 8 * 5 * 7 * 16),
        ("aten::_flash_attention_forward", (*[(40, 8, 16)] * 3, (3,), (3,)), None),  # packed: the lengths are unknown
        ("aten::mm", ((3, 5), (6, 7)), None),  # they do not fit
        ("aten::mm", ((3, 5),), None),
        ("aten::mm", (((3, 5), (5, 7)), ()), None),  # a list of tensors
        ("aten::mm", ((1 << 40, 1 << 40), (1 << 40, 2)), None),  # damaged
        ("aten::relu", ((3, 5),), None),
    ],
)
def test_shapes_give_flops_or_none(name: str, shapes: tuple[Any, ...], expected: int | None) -> None:
    assert flops(name, shapes) == expected


def schema_of(name: str) -> list[str]:
    """Return the names of an operator's inputs."""
    return [
        argument.name for argument in getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema.arguments
    ]


@pytest.mark.parametrize("name", [name for name in FORMULAS if "attention" in name and name.startswith("aten::")])
@pytest.mark.parametrize("causal", ["True", "False", ""])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_counts_model_flops(name: str, causal: str, masked: bool) -> None:
    """FLOPs equal `cost`, with inputs placed by PyTorch's schema; backward is twice forward."""
    inputs = schema_of(name)
    masks = [place for place, one in enumerate(inputs) if one in ("attn_mask", "attn_bias")]
    shapes, texts = [()] * len(inputs), [""] * len(inputs)
    for place, shape in zip((inputs.index(one) for one in ("query", "key", "value")), (Q, K, V), strict=True):
        by_position = "_flash_attention_" in name and "dot_product" not in name
        shapes[place] = (shape[0], shape[2], shape[1], shape[3]) if by_position else shape
    if masked and masks:
        shapes[masks[0]] = (5, 7)
    texts[inputs.index("is_causal")] = causal
    lower = "flash_attention" in name and "for_cpu" not in name
    shown = twice_credited_scores(5, 7, 2 if lower else 0) if causal == "True" else 2 * 5 * 7
    work = operator_work(name, shapes, texts)
    assert work is not None
    assert work.flops == (2 if name.endswith("backward") else 1) * 2 * 8 * shown * (16 + 12)
    assert work.formula.endswith(MAY_HIDE) == (not causal or bool(masked and masks))


@pytest.mark.parametrize(
    ("before", "after", "twice"),
    [("3", "0", twice_credited_scores(9, 9, 0, 4)), ("-1", "0", 81), ("-1", "-1", 162), ("2", "1", None)],
)
def test_window_of_a_fused_attention_counts_its_visible_scores(before: str, after: str, twice: int | None) -> None:
    inputs = schema_of("aten::_flash_attention_forward")
    texts = [""] * len(inputs)
    for one, text in (("is_causal", "False"), ("window_size_left", before), ("window_size_right", after)):
        texts[inputs.index(one)] = text
    twice = twice_credited_scores(9, 9, 1, 4) if twice is None else twice
    expected = 2 * 3 * twice * 2 * 16
    assert flops("aten::_flash_attention_forward", ((2, 9, 3, 16),) * 3, *texts) == expected


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, 1, 1, 2), (3, 2, 2, 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_count_as_in_pytorch(
    stride: int, padding: int, dilation: int, groups: int, transposed: bool
) -> None:
    x = torch.empty(2, 8, 17, 19, device="meta")
    weight = torch.empty(*((8, 12 // groups) if transposed else (12, 8 // groups)), 3, 5, device="meta")
    how = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], groups)
    out = torch.ops.aten.convolution(x, weight, None, *how)
    expected = conv_flop_count(x.shape, weight.shape, out.shape, transposed)
    shapes, texts = ((2, 8, 17, 19), tuple(weight.shape), ()), ("", "", "", *map(str, how))
    assert flops("aten::convolution", shapes, *texts) == expected
    backward = (tuple(out.shape), *shapes[:2], *[()] * 8)
    for mask in ("[True, True, False]", "[False, True, True]"):
        counted = flops("aten::convolution_backward", backward, "", "", "", "[12]", *map(str, how), mask)
        assert counted == expected * mask[:-6].count("True")


def test_flops_of_a_convolution_without_its_arguments_are_unknown() -> None:
    assert flops("aten::conv2d", ((2, 8, 17, 19), (12, 8, 3, 3), (12,))) is None
