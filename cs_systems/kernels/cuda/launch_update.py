"""Launches of weight_update.cu: AdamW of several weights inside the products that make their gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cs_systems.kernels.cuda.driver import Launch, tensor_map
from cs_systems.kernels.driver import Address, Struct

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


class Place(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("rows", "columns", "first_tile", "down", "across", "together")
    )


def names(weights: int) -> list[str]:
    """Return the operands' names for so many weights, then those of the settings and of the steps' progress."""
    return [*(f"{name}{i}" for i in range(weights) for name in OPERANDS), "settings", "progress"]


def tiles_of(rows: int, columns: int, cluster: int = UpdateOptions.cluster) -> int:
    """Return the number of clusters' tiles of a weight."""
    return -(-rows // (ROWS * cluster)) * -(-columns // COLUMNS)


def update_weights(
    operands: Sequence[Tensor], multiprocessors: int, options: UpdateOptions | None = None
) -> Launch:
    """Return the launch that updates weights.

    Args:
        operands: in the order of `names`. For each weight d_out (tokens, rows) and x (tokens, columns), bfloat16, whose
            rows may lie apart; and contiguous (rows, columns): the weight, bfloat16, its remainder, int16, and both
            moments, float32 or all bfloat16. settings: float32 (lr, 1 - beta1, 1 - beta2, eps, weight decay); progress:
            float64 (number of the step from 1, 1 - beta1^t, 1 - beta2^t).
        multiprocessors: of the device.
        options: as tuned, by default.
    """
    options = options or UpdateOptions()
    count = len(operands) // len(OPERANDS)
    maps, weights, first = [list[object](), list[object]()], list[object](), 0
    for i in range(count):
        d_out, x, upper = operands[len(OPERANDS) * i : len(OPERANDS) * i + 3]
        maps[0].append(tensor_map(f"d_out{i}", d_out[None, None], options.tokens))
        maps[1].append(tensor_map(f"x{i}", x[None, None], options.tokens))
        rows, columns = upper.shape
        down, across = -(-rows // (ROWS * options.cluster)), -(-columns // COLUMNS)
        together = -(-across // -(-across // MOST_ACROSS))
        weights += [Address(f"{name}{i}") for name in OPERANDS[2:]]
        weights.append(Place(rows, columns, first, down, across, together))
        first += down * across
    tokens = operands[0].shape[0]
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
        "weight_update", "update_weights", tuple(macros.items()), blocks, 384, options.shared_bytes(bf16_state), parameters
    )
