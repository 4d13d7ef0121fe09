"""Padding of batches: the same filler at the ends of rows of the models' inputs, or fewer tokens than positions.

Values are read in steps that are not timed, because reading them waits for an accelerator. Where a recurrent layer gets
packed sequences, it skips the padding, and nothing is kept, unless other layers with padded inputs take most of the
modules' time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from cs_systems.analysis.comparison.loop_findings import PADDING, PaddingRow
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.inputs import StepInputs, batches_of, rows_of_tokens
from cs_systems.measure.recorder.module_calls import CallObserver, SeenCall
from cs_systems.measure.recorder.observers import UNTIMED, Found, ModelCall, Period
from cs_systems.measure.workloads._batches import tensors_in

MOST_ELEMENTS = 1 << 22
MOST_LOOKS = 8
FEWEST_ROWS = 2
LEAST_LENGTH = 4  # least length of a row
MOSTLY = 0.5  # share of the modules' time
AT_ENDS = 0.9  # least share of the fillers that is at the ends of samples; sparse data have zeros anywhere
WHOLE = 0.999  # share of filler above which a batch is artificial data


class Padding(CallObserver):
    """Shares of padding in the observed batches."""

    def __init__(self) -> None:
        super().__init__()
        self._shares: list[float] = []
        self._shape: tuple[int, ...] = ()
        self._filler: int | None = None
        self.restart()

    def restart(self) -> None:
        self._is_packed, self._padded_s = False, 0.0
        self._of_padded: list[float] = []  # share of each step's modules that get all positions

    def begins(self, period: Period) -> None:
        self.is_looking = period in UNTIMED

    def look_at_call(self, call: ModelCall) -> None:
        """Read the first argument of a step's first call that holds tokens, or sequences of vectors."""
        if call.number > 1 or len(self._shares) >= MOST_LOOKS:
            return
        with torch._C.DisableTorchFunction():
            for tensor in tensors_in(call.arguments):
                if (share := filled_share(tensor)) is not None:
                    self._shares.append(share[0])
                    self._shape, self._filler = tuple(tensor.shape), share[1]
                    return

    @as_guest
    def call_seen(self, call: SeenCall) -> None:
        """Note that a recurrent layer gets packed sequences, and the time of layers that get all positions."""
        positional, named = call.inputs
        given = positional[0] if positional else named.get("input")
        if isinstance(call.module, nn.RNNBase) and isinstance(given, PackedSequence):
            self._is_packed = True
        elif isinstance(given, Tensor) and not any(True for _ in call.module.children()) and self._has_all(given):
            self._padded_s += call.time_s

    def _has_all(self, inputs: Tensor) -> bool:
        """Return whether a layer's inputs have all positions of the batch, as two dimensions or one."""
        rows = self._shape[:2]
        return len(rows) == 2 and (tuple(inputs.shape[:2]) == rows or inputs.shape[:1] == (math.prod(rows),))

    @as_guest
    def step_seen(self, modules_s: float) -> None:
        self._of_padded.append(self._padded_s / modules_s if modules_s else 0.0)
        self._padded_s = 0.0

    def results(self, inputs: Sequence[StepInputs], is_timed: bool) -> Found | None:
        if self._is_packed and min(self._of_padded, default=0.0) <= MOSTLY:  # a pause makes one step's share larger
            return None
        shapes = [rows_of_tokens(batch) for batch in batches_of(inputs)]
        rows = self.rows(shapes, [each.tokens for each in inputs]) if is_timed else []
        return Found(PADDING.filled(rows)) if rows else None

    def rows(self, shapes: Sequence[tuple[int, ...]], tokens: Sequence[int | None]) -> list[PaddingRow]:
        """Return the row of the batches.

        Args:
            shapes: the first input's shape in each timed step, if it is a row of tokens per sequence; else empty.
            tokens: the number of tokens that the loop gave for each timed step.
        """
        given = [(*shape, count) for shape, count in zip(shapes, tokens, strict=True) if shape and count]
        # a number of tokens, not of samples
        if given and all(rows < count <= rows * length for rows, length, count in given):
            positions, count = sum(rows * length for rows, length, _ in given), sum(count for *_, count in given)
            if count < positions:
                return [_row(1 - count / positions, len(given), "tokens", given[-1][:2], None)]
        if self._shares and min(self._shares) < WHOLE:
            return [_row(sum(self._shares) / len(self._shares), len(self._shares), "filler", self._shape, self._filler)]
        return []


def _row(share: float, steps: int, basis: str, shape: Sequence[int], filler: int | None) -> PaddingRow:
    return {"share": share, "steps": steps, "basis": basis, "shape": " × ".join(map(str, shape)), "filler": filler}


def filled_share(tensor: Tensor) -> tuple[float, int | None] | None:
    """Return the share of positions at the ends of rows that is filler, and the filler; None for other tensors.

    Tokens are whole numbers of shape (rows, length). Vectors of shape (rows, length, width) are padded with zeros.
    """
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        return None
    is_tokens = tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    is_vectors = tensor.dim() == 3 and tensor.is_floating_point()
    if not (is_tokens or is_vectors) or tensor.size(0) < FEWEST_ROWS or tensor.size(1) < LEAST_LENGTH:
        return None
    if tensor.numel() > MOST_ELEMENTS:
        return None
    values = tensor.detach()
    if is_vectors:
        return _longest_ends(values.eq(0).all(dim=2)), None
    values = values.cpu()
    if int(values.max()) - int(values.min()) <= 1:  # a mask
        return None
    best = 0.0, None
    for column in (values[:, -1], values[:, 0]):
        filler = int(column.mode().values)
        share = _longest_ends(values.eq(filler))
        if share > best[0]:
            best = share, filler  # type: ignore[assignment]
    return best


def _longest_ends(is_filler: Tensor) -> float:
    """Return the share of positions in runs of at least two fillers at one end of the rows, the larger of both ends.

    A row that holds only fillers is not a padded sample. If the last rows are empty, or the first ones, the rows may be
    time steps, and the samples are looked at too.
    """
    is_empty = is_filler.all(1)
    share = _ends(is_filler & ~is_empty[:, None])
    if not (bool(is_empty[-2:].all()) or bool(is_empty[:2].all())):
        return share
    of_samples = _ends(is_filler.T)
    return max(share, of_samples) if of_samples >= AT_ENDS * float(is_filler.float().mean()) else share


def _ends(is_filler: Tensor) -> float:
    """Return the share of such runs. If all rows end with the same number of fillers, it is a border, not padding."""
    shares = []
    for side in (is_filler.flip(1), is_filler):
        runs = side.long().cumprod(1).sum(1)
        runs = torch.where(runs > 1, runs, 0)
        is_border = int(runs.min()) == int(runs.max())
        shares.append(0.0 if is_border else float(runs.sum()) / is_filler.numel())
    return max(shares)
