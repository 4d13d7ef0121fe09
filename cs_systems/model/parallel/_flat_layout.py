"""Layout of parameters side by side in one tensor that is divided equally among N ranks.

The cuts between ranks may be inside a parameter. Each parameter begins at a multiple of ALIGNMENT bytes, and so does
each rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes that a GPU loads at once; unaligned, kernels are slower and may sum in another order


@dataclass(frozen=True)
class FlatLayout:
    """Layout of a flat tensor, in elements.

    counts: length of each parameter; gaps: padding after each; part: length of a rank's part of the whole tensor.
    """

    counts: tuple[int, ...]
    gaps: tuple[int, ...]
    part: int

    @classmethod
    def of(cls, counts: Sequence[int], world_size: int, dtype: torch.dtype) -> FlatLayout:
        unit = ALIGNMENT // dtype.itemsize
        gaps = [-count % unit for count in counts]
        length = sum(counts) + sum(gaps)
        part = -(-length // (unit * world_size)) * unit
        gaps[-1] += part * world_size - length
        return cls(tuple(counts), tuple(gaps), part)

    @property
    def starts(self) -> list[int]:
        lengths = [count + gap for count, gap in zip(self.counts, self.gaps, strict=True)]
        return list(accumulate(lengths[:-1], initial=0))

    def held(self, rank: int) -> list[tuple[int, int, int]]:
        """Return (start, stop, in_part) of each parameter: the elements on the rank, and their offset in its part."""
        begin, end = rank * self.part, (rank + 1) * self.part
        return [
            (
                min(max(begin - at, 0), count),
                min(max(end - at, 0), count),
                min(max(at - begin, 0), self.part),
            )
            for at, count in zip(self.starts, self.counts, strict=True)
        ]

    def lined_up(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors with these counts of elements into one tensor, with zeros in the gaps."""
        pieces = []
        for tensor, gap in zip(tensors, self.gaps, strict=True):
            pieces += [tensor.reshape(-1), tensor.new_zeros(gap)] if gap else [tensor.reshape(-1)]
        return torch.cat(pieces)
