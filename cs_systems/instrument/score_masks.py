"""Scores that a mask shows, by its content: a causal mask is known by its values, however it was written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

HIDDEN_BELOW = 600.0  # the largest score of a row, as −10⁴ does that was divided by the root of a d_head up to 256
LOWEST = -1e8  # of scores without a mask
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


def shown_in(scores: Tensor, dim: int = -1) -> Shown:
    """Return the share of the scores that their mask shows, as `cost.twice_credited_scores` counts it.

    Each row counts its shown elements. An edge that moves by one key from row to row is a diagonal, which cuts its
    elements in half. So a causal S × S matrix has S²/2, packed or windowed sequences have the sum over their parts, and
    a padded sequence has what its padding leaves.

    Args:
        scores: Masked scores, or a mask to add to them, or a boolean mask with True where a score is shown: (...,
            queries, keys).
        dim: The dimension of the keys, where it is not the last one.
    """
    scores = scores.detach()
    if without_values(scores):
        return Shown(1, 1, known=False)
    scores = scores.movedim(dim, -1) if scores.dim() else scores
    scores = scores[(None,) * max(0, 2 - scores.dim())]
    for dim in range(scores.dim() - 2):
        if scores.stride(dim) == 0:  # of a mask that was expanded
            scores = scores.narrow(dim, 0, min(1, scores.shape[dim]))
    if not scores.numel():
        return Shown(1, 1)
    count, edges = _totals(scores)
    if edges == 0 and count < scores.numel() and scores.dim() > 3:
        edges = min(0, _totals(scores.transpose(-3, -2))[1])  # of (…, queries, heads, keys)
    return Shown(2 * count + edges, 2 * scores.numel())


def _totals(scores: Tensor) -> tuple[int, int]:
    """Return the number of shown scores, and what the diagonal edges change of twice this number."""
    rows, keys = scores.shape[-2:]
    parts = scores.reshape(-1, rows, keys).split(max(1, MOST_ELEMENTS // (rows * keys)))
    totals = [(int(shown.sum()), int(_edges(shown))) for shown in map(_is_shown, parts)]
    return sum(count for count, _ in totals), sum(edges for _, edges in totals)


def _is_shown(scores: Tensor) -> Tensor:
    if not scores.is_floating_point():
        return scores.bool()
    lowest = max(LOWEST, torch.finfo(scores.dtype).min / 2)
    top = scores.amax(-1, keepdim=True).clamp(min=lowest)
    is_low = scores < top - HIDDEN_BELOW
    # A mask leaves a gap; without one the scores fall step by step, as those of a bias that grows with the distance.
    has_gap = ~((scores < top - HIDDEN_BELOW / 2) & ~is_low).any(-1, keepdim=True)
    return (scores > lowest) & ~(is_low & has_gap)


def _edges(shown: Tensor) -> Tensor:
    """Return what the diagonal edges of boolean matrices (n, queries, keys) change of twice their shown scores."""
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
    return leaves.sum() + leaves_first.sum() - moves_on.sum() - begins.sum()
