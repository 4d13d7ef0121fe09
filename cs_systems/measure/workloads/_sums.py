"""Summation methods along the first dimension of a tensor, each step rounded to the tensor's dtype: (n, …) → (…)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from cs_systems.config import Precision

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def sequential(x: Tensor, at: Collection[int] = ()) -> dict[int, Tensor]:
    """Add the rows one after the other into one accumulator.

    Returns the sums of the first n rows, for each n of `at` and for all rows.
    """
    total, found, wanted = torch.zeros_like(x[0]), {}, {*at, len(x)}
    for n, row in enumerate(x.unbind(0), 1):
        total = total + row
        if n in wanted:
            found[n] = total
    return found


def kahan(x: Tensor, at: Collection[int] = ()) -> dict[int, Tensor]:
    """Add the rows as `sequential` does, with compensation for the rounding errors (Kahan 1965)."""
    total, lost, found, wanted = torch.zeros_like(x[0]), torch.zeros_like(x[0]), {}, {*at, len(x)}
    for n, row in enumerate(x.unbind(0), 1):
        corrected = row - lost
        after = total + corrected
        lost = (after - total) - corrected
        total = after
        if n in wanted:
            found[n] = total
    return found


def pairwise(x: Tensor) -> Tensor:
    """Add neighbours first, then their sums: each term passes through ⌈log2 n⌉ roundings."""
    while len(x) > 1:
        even = len(x) // 2 * 2
        x = torch.cat([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]
