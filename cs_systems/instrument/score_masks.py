"""Visible scores of a mask, found from its values, so that a causal mask is recognised however it was written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# A score is masked if it is this far below the row's largest: −10⁴ divided by √d_head is, up to a d_head of 256.
HIDDEN_BELOW = 600.0
LOWEST = -1e8  # scores up to this are masked
MOST_ELEMENTS = 1 << 26  # elements per pass over the scores, to bound the memory


class Shown(NamedTuple):
    """Visible share of the scores, `twice` out of `cells`; `known` is False if the values are not available."""

    twice: int
    cells: int
    known: bool = True

    def of(self, count: int) -> int:
        """Return the visible share of a count that is proportional to the scores."""
        return count * self.twice // self.cells

    @property
    def is_all(self) -> bool:
        return self.known and self.twice == self.cells


def without_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def shown_in(scores: Tensor, dim: int = -1) -> Shown:
    """Return the visible share of the scores, as `cost.twice_credited_scores` counts it.

    Each row counts its shown elements. An edge that moves by one key from row to row is a diagonal, which cuts its
    elements in half. So a causal S × S matrix has S²/2, packed or windowed sequences have the sum over their parts, and
    a padded sequence has the scores outside of its padding.

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
        if scores.stride(dim) == 0:  # a dimension of an expanded mask
            scores = scores.narrow(dim, 0, min(1, scores.shape[dim]))
    if not scores.numel():
        return Shown(1, 1)
    count, edges = _totals(scores)
    if edges == 0 and count < scores.numel() and scores.dim() > 3:
        edges = min(0, _totals(scores.transpose(-3, -2))[1])  # shape (…, queries, heads, keys)
    return Shown(2 * count + edges, 2 * scores.numel())


def _totals(scores: Tensor) -> tuple[int, int]:
    """Return the number of visible scores, and the correction of twice this number for diagonal edges."""
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
    # a mask leaves a gap in the values; with a bias that grows with the distance, the scores decrease gradually
    has_gap = ~((scores < top - HIDDEN_BELOW / 2) & ~is_low).any(-1, keepdim=True)
    return (scores > lowest) & ~(is_low & has_gap)


def _edges(shown: Tensor) -> Tensor:
    """Return the correction of twice the visible scores for diagonal edges of boolean matrices (n, queries, keys)."""
    keys = shown.shape[-1]
    count = shown.sum(-1)
    first = shown.view(torch.uint8).argmax(-1)
    last = keys - 1 - shown.flip(-1).view(torch.uint8).argmax(-1)
    seen = count > 0
    both = seen[:, 1:] & seen[:, :-1]
    moves_on = both & (last[:, 1:] == last[:, :-1] + 1)
    leaves = both & (first[:, 1:] == first[:, :-1] + 1)
    # the first row that sees a key is on the edge if the next row is on it too
    is_first = ~torch.nn.functional.pad(seen, (1, 0))[:, :-2]
    begins, leaves_first = moves_on & is_first, leaves & is_first & (first[:, :-1] > 0)
    return leaves.sum() + leaves_first.sum() - moves_on.sum() - begins.sum()
