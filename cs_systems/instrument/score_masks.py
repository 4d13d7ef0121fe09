"""Scores that a mask shows, by its content: a causal mask is known by its values, however it was written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

HIDDEN_BELOW = 1000.0  # a score so far below the largest of its row has the weight 0 in every dtype
MOST_ELEMENTS = 1 << 26  # of one pass over scores, which bounds its memory


class Shown(NamedTuple):
    """Share of the scores that is credited, `twice` of `cells`; `known` is False where the values are not at hand."""

    twice: int
    cells: int
    known: bool = True

    def of(self, count: int) -> int:
        """Return the share of a count that is proportional to the scores."""
        return count * self.twice // self.cells

    @property
    def is_all(self) -> bool:
        return self.known and self.twice == self.cells


def without_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def shown_in(scores: Tensor) -> Shown:
    """Return the share of the scores that their mask shows, as `cost.twice_credited_scores` counts it.

    Each row counts its shown elements. An edge that moves by one key from row to row is a diagonal, which cuts its
    elements in half. So a causal S × S matrix has S²/2, packed or windowed sequences have the sum over their parts, and
    a padded sequence has what its padding leaves.

    Args:
        scores: Masked scores, or a mask to add to them, or a boolean mask with True where a score is shown: (...,
            queries, keys).
    """
    scores = scores.detach()
    if without_values(scores):
        return Shown(1, 1, known=False)
    scores = scores[(None,) * max(0, 2 - scores.dim())]
    for dim in range(scores.dim() - 2):
        if scores.stride(dim) == 0:  # of a mask that was expanded
            scores = scores.narrow(dim, 0, min(1, scores.shape[dim]))
    rows, keys = scores.shape[-2:]
    matrices = scores.reshape(-1, rows, keys)
    if not matrices.numel():
        return Shown(1, 1)
    parts = matrices.split(max(1, MOST_ELEMENTS // (rows * keys)))
    twice = sum(int(_twice_shown(_is_shown(part))) for part in parts)
    return Shown(twice, 2 * matrices.numel())


def _is_shown(scores: Tensor) -> Tensor:
    if not scores.is_floating_point():
        return scores.bool()
    lowest = torch.finfo(scores.dtype).min / 2  # masks are filled with the smallest number, or with −inf
    return (scores > lowest) & (scores >= scores.amax(-1, keepdim=True).clamp(min=lowest) - HIDDEN_BELOW)


def _twice_shown(shown: Tensor) -> Tensor:
    """Return twice the shown scores of boolean matrices (n, queries, keys), whose diagonal edges count half."""
    keys = shown.shape[-1]
    count = shown.sum(-1)
    first = shown.view(torch.uint8).argmax(-1)
    last = keys - 1 - shown.flip(-1).view(torch.uint8).argmax(-1)
    seen = count > 0
    both = seen[:, 1:] & seen[:, :-1]
    moves_on = both & (last[:, 1:] == last[:, :-1] + 1)
    leaves = both & (first[:, 1:] == first[:, :-1] + 1)
    # The first row that sees a key is on an edge that the next row is on.
    is_first = ~torch.nn.functional.pad(seen, (1, 0))[:, :-2]
    begins, leaves_first = moves_on & is_first, leaves & is_first & (first[:, :-1] > 0)
    return 2 * count.sum() - moves_on.sum() - begins.sum() + leaves.sum() + leaves_first.sum()
