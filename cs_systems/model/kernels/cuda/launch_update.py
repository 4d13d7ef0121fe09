"""Launches of weight_update.cu: AdamW of several weights, fused into the products that make their gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cs_systems.model.kernels.cuda.driver import Launch
from cs_systems.model.kernels.cuda.launch_product import (
    ROWS,
    THREADS,
    ProductOptions,
    summed_along_columns,
)
from cs_systems.model.kernels.driver import Address, Struct

OPERANDS = ("d_out", "x", "upper", "lower", "first", "second")
"""Operands of one weight: gradient of the product's output, input, weight, remainder, moments; its number follows."""
SHORT, LONG = ProductOptions(depth=48, ahead=6, cluster=1), ProductOptions(ahead=2)
MOST_SHORT_TOKENS = 4096
"""Tokens up to which SHORT is faster: there the memory traffic of the update takes longer than the product, so more is
loaded ahead. 2 to 3% at 2048 tokens on one H200; at 8192 LONG is 5 to 7% faster."""


class Shape(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int), ("columns", ctypes.c_int))


def names(weights: int) -> list[str]:
    """Return the operands' names for this many weights, then the names of the settings and of the steps' progress."""
    return [*(f"{name}{i}" for i in range(weights) for name in OPERANDS), "settings", "progress"]


def waves(shapes: Iterable[Sequence[int]], multiprocessors: int) -> int:
    """Return the number of waves of tiles in a launch on weights of these shapes."""
    return -(-LONG.tiles(shapes) // (multiprocessors // LONG.cluster))


def update_weights(operands: Sequence[Tensor], multiprocessors: int) -> Launch:
    """Return the launch that updates weights.

    Args:
        operands: in the order of `names`. For each weight d_out (tokens, rows) and x (tokens, columns), bfloat16, with
            any row stride; and contiguous (rows, columns): the weight, bfloat16, its remainder, int16, and both
            moments, float32 or all bfloat16. settings: float32 (lr, 1 - beta1, 1 - beta2, eps, weight decay); progress:
            float64 (number of the step from 1, 1 - beta1^t, 1 - beta2^t).
        multiprocessors: number of multiprocessors of the device.
    """
    tokens, bf16_state = operands[0].shape[0], operands[4].dtype is torch.bfloat16
    options = SHORT if tokens <= MOST_SHORT_TOKENS else LONG
    left, right, weights, shapes = [], [], list[object](), []
    for i in range(len(operands) // len(OPERANDS)):
        d_out, x, upper = operands[len(OPERANDS) * i : len(OPERANDS) * i + 3]
        left.append(summed_along_columns(f"d_out{i}", d_out, options.depth, ROWS))
        right.append(summed_along_columns(f"x{i}", x, options.depth, options.columns // options.cluster))
        shapes.append(tuple(upper.shape))
        weights += [*(Address(f"{name}{i}") for name in OPERANDS[2:]), Shape(*upper.shape)]
    macros = (*options.macros(True, True, len(shapes)), ("BF16_STATE", int(bf16_state)))
    return Launch(
        "weight_update",
        "update_weights",
        macros,
        options.blocks(options.tiles(shapes), multiprocessors),
        THREADS,
        options.shared_bytes(options.columns * (8 if bf16_state else 12)),
        (
            options.products(left, right, shapes, tokens),
            Struct(tuple(weights)),
            Address("settings"),
            Address("progress"),
        ),
    )
