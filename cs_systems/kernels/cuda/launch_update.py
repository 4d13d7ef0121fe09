"""Launches of weight_update.cu: AdamW of several weights inside the products that make their gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cs_systems.kernels.cuda.driver import Launch, tensor_map
from cs_systems.kernels.driver import Address, Struct, TensorMap

ROWS, COLUMNS, UPDATERS = 128, 256, 3
"""Of a tile of a weight, and the warps that update it."""
OPERANDS = ("d_out", "x", "upper", "lower", "first", "second")
"""Of one weight: gradient of its product's output, input, weight, remainder, moments. Numbered by the weight."""
MOST_ACROSS = 12
"""Tiles beside each other that are computed together: their x and as many d_out stay in the L2 cache."""


@dataclass(frozen=True)
class UpdateOptions:
    """Options of weight_update.cu.

    tokens: of a stage. ahead: rows that each warp of the update loads ahead. cluster: blocks that share x.
    """

    tokens: int = 64
    stages: int = 3
    ahead: int = 2
    cluster: int = 2

    def shared_bytes(self, bf16_state: bool) -> int:
        stages, rows = self.stages * (ROWS + COLUMNS) * self.tokens * 2, UPDATERS * self.ahead
        barriers = 2 * self.stages + 4 + rows
        return stages + ROWS * COLUMNS * 2 + rows * COLUMNS * (8 if bf16_state else 12) + 8 * barriers


SHORT, LONG = UpdateOptions(48, 3, 6, 1), UpdateOptions()
MOST_SHORT_TOKENS = 4096
"""Tokens up to which SHORT is faster: the bytes of the update take longer than the product, so more of them are loaded
ahead. 3% at 2048 tokens on one H200; at 8192 LONG is 7% faster."""


class Place(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("rows", "columns", "first_tile", "down", "across", "together"))


def names(weights: int) -> list[str]:
    """Return the operands' names for so many weights, then those of the settings and of the steps' progress."""
    return [*(f"{name}{i}" for i in range(weights) for name in OPERANDS), "settings", "progress"]


def waves(shapes: Iterable[Sequence[int]], multiprocessors: int) -> int:
    """Return how many tiles, one after the other, a launch on weights of these shapes takes."""
    cluster = LONG.cluster
    tiles = sum(-(-rows // (ROWS * cluster)) * -(-columns // COLUMNS) for rows, columns in shapes)
    return -(-tiles // (multiprocessors // cluster))


def columns_map(operand: str, x: Tensor, tokens: int, columns: int) -> TensorMap:
    """Return the map of x (tokens, width): boxes of so many tokens and columns, the columns in blocks of 64.

    The width is a multiple of 64.
    """
    blocks = x.unflatten(-1, (-1, 64)).transpose(0, 1)  # (width / 64, tokens, 64)
    return replace(tensor_map(operand, blocks[None], tokens), box=(64, tokens, columns // 64, 1))


def update_weights(operands: Sequence[Tensor], multiprocessors: int, options: UpdateOptions | None = None) -> Launch:
    """Return the launch that updates weights.

    Args:
        operands: in the order of `names`. For each weight d_out (tokens, rows) and x (tokens, columns), bfloat16, whose
            rows may lie apart; and contiguous (rows, columns): the weight, bfloat16, its remainder, int16, and both
            moments, float32 or all bfloat16. settings: float32 (lr, 1 - beta1, 1 - beta2, eps, weight decay); progress:
            float64 (number of the step from 1, 1 - beta1^t, 1 - beta2^t).
        multiprocessors: of the device.
        options: as tuned, by default.
    """
    tokens = operands[0].shape[0]
    options = options or (SHORT if tokens <= MOST_SHORT_TOKENS else LONG)
    count = len(operands) // len(OPERANDS)
    maps, weights, first = [list[object](), list[object]()], list[object](), 0
    for i in range(count):
        d_out, x, upper = operands[len(OPERANDS) * i : len(OPERANDS) * i + 3]
        maps[0].append(columns_map(f"d_out{i}", d_out, options.tokens, ROWS))
        maps[1].append(columns_map(f"x{i}", x, options.tokens, COLUMNS // options.cluster))
        rows, columns = upper.shape
        down, across = -(-rows // (ROWS * options.cluster)), -(-columns // COLUMNS)
        together = -(-across // -(-across // MOST_ACROSS))
        weights += [Address(f"{name}{i}") for name in OPERANDS[2:]]
        weights.append(Place(rows, columns, first, down, across, together))
        first += down * across
    struct = Struct((*maps[0], *maps[1], *weights, ctypes.c_int(tokens), ctypes.c_int(first)))
    bf16_state = operands[4].dtype is torch.bfloat16
    macros = {
        "PROBLEMS": count,
        "TOKENS": options.tokens,
        "STAGES": options.stages,
        "AHEAD": options.ahead,
        "CLUSTER": options.cluster,
        "BF16_STATE": int(bf16_state),
    }
    blocks = min(first, multiprocessors // options.cluster) * options.cluster
    parameters = (struct, Address("settings"), Address("progress"))
    return Launch(
        "weight_update",
        "update_weights",
        tuple(macros.items()),
        blocks,
        384,
        options.shared_bytes(bf16_state),
        parameters,
    )
