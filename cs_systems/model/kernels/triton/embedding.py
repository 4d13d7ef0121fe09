# mypy: allow-untyped-defs, allow-incomplete-defs
"""Gradient of an embedding table in Triton, without atomic additions. Importing it needs triton.

The first two launches sort the positions of the tokens by row, stably: a program of the first scans all token ids and
lists those in a range of rows; a program of the second sorts the list for a few rows of the range. The third sums each
piece of SPLIT sorted positions that belongs to one row, so that several programs share a frequent token. The fourth
writes every row once: the sum of its remaining positions and its pieces, in order, or zeros. Sums are the same from run
to run.

Bytes, for N tokens, V rows, width D and s bytes per element: N·D·s read and V·D·s written once, which is the least.
Positions and starts are a few bytes for each token and row; the scans read V / RANGE · 16 N bytes from the caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs_systems.model.kernels.triton.launch import Launch
from cs_systems.model.kernels.triton.rows import row_stride, tile, wide

RANGE = 256  # rows of the table for which a program lists positions
SCAN = 2048  # token ids that a program reads at once
ROWS = 8  # rows of a range for which a program sorts the list; divides RANGE
LISTED = 256  # positions of the list that a program reads at once
SPLIT = 64  # sorted positions per piece
AHEAD = 4  # gradients that a program reads before it adds them
TILE = 2048  # elements of the table that a program writes


@triton.jit
def embedding_list_kernel(tokens, listed, bounds, count, rows, RANGE: tl.constexpr, SCAN: tl.constexpr):
    """List the positions of the tokens of RANGE rows, ascending, after the positions of all lower rows' tokens.

    tokens, listed: (count,). bounds: (ranges, 2), first position and end of each list. The grid is (ranges,).
    """
    first = tl.program_id(0) * RANGE
    i = tl.arange(0, SCAN)
    below = tl.zeros([SCAN], tl.int32)
    for start in range(0, count, SCAN):
        token = tl.load(tokens + start + i, mask=start + i < count, other=rows)
        below += (token < first).to(tl.int32)
    begin = tl.sum(below, 0)
    end = begin
    for start in range(0, count, SCAN):
        token = tl.load(tokens + start + i, mask=start + i < count, other=-1)
        mine = ((token >= first) & (token < first + RANGE)).to(tl.int32)
        tl.store(listed + end + tl.cumsum(mine, 0) - 1, start + i, mask=mine > 0)
        end += tl.sum(mine, 0)
    tl.store(bounds + 2 * tl.program_id(0), begin)
    tl.store(bounds + 2 * tl.program_id(0) + 1, end)


@triton.jit
def embedding_sort_kernel(
    tokens, listed, bounds, order, starts, rows, RANGE: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr
):
    """Write the positions of the tokens of ROWS rows, by row and then ascending, and the start of each row.

    order: (count,). starts: (rows + 1,). The grid is ((rows + 1) / ROWS,).
    """
    first = tl.program_id(0) * ROWS
    row, j = first + tl.arange(0, ROWS), tl.arange(0, LISTED)
    begin = tl.load(bounds + first // RANGE * 2)
    end = tl.load(bounds + first // RANGE * 2 + 1)
    below, found = tl.zeros([LISTED], tl.int32), tl.zeros([ROWS], tl.int32)
    for start in range(begin, end, LISTED):
        position = tl.load(listed + start + j, mask=start + j < end, other=0)
        token = tl.load(tokens + position, mask=start + j < end, other=rows)
        below += (token < first).to(tl.int32)
        found += tl.sum(((token[None, :] == row[:, None]) & (start + j < end)[None, :]).to(tl.int32), 1)
    place = begin + tl.sum(below, 0) + tl.cumsum(found, 0) - found
    tl.store(starts + row, place, mask=row <= rows)
    if tl.sum(found, 0) > 0:
        for start in range(begin, end, LISTED):
            position = tl.load(listed + start + j, mask=start + j < end, other=0)
            token = tl.load(tokens + position, mask=start + j < end, other=-1)
            same = (token[None, :] == row[:, None]).to(tl.int32)
            to = tl.sum(same * (place[:, None] + tl.cumsum(same, 1) - 1), 0)
            tl.store(order + to, position, mask=tl.sum(same, 0) > 0)
            place += tl.sum(same, 1)


@triton.jit
def embedding_pieces_kernel(
    d_out, tokens, order, pieces, d_out_row, width, tiles,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the sum of d_out over SPLIT sorted positions, if all belong to one row, for one tile of the width.

    pieces: (count // SPLIT, width). The grid is (count // SPLIT · tiles,).
    """
    piece = tl.program_id(0) // tiles
    i = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    order += piece * SPLIT
    if tl.load(tokens + tl.load(order)) == tl.load(tokens + tl.load(order + SPLIT - 1)):
        total = tl.zeros([BLOCK], WIDE)
        for start in range(0, SPLIT, AHEAD):
            for n in tl.static_range(AHEAD):
                position = tl.load(order + start + n).to(tl.int64)
                total += tl.load(d_out + position * d_out_row + i, mask=i < width, other=0.0).to(WIDE)
        tl.store(pieces + piece.to(tl.int64) * width + i, total, mask=i < width)


@triton.jit
def embedding_gradient_kernel(
    d_out, order, starts, pieces, d_table, d_out_row, rows, width, tiles,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write one tile of ROWS rows of d_table (rows, width). The grid is (rows / ROWS · tiles,).

    A row sums its positions before the first whole piece and after the last one, and then its whole pieces.
    """
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = (i < width)[None, :]
    begin = tl.load(starts + row, mask=row < rows, other=0)
    end = tl.load(starts + row + 1, mask=row < rows, other=0)
    piece = (begin + SPLIT - 1) // SPLIT
    whole = tl.maximum(end // SPLIT - piece, 0)
    single = end - begin - whole * SPLIT
    total = tl.zeros([ROWS, BLOCK], WIDE)
    for start in range(0, tl.max(single, 0), AHEAD):
        for n in tl.static_range(AHEAD):
            place = begin + start + n
            place += tl.where(place >= piece * SPLIT, whole * SPLIT, 0)
            has = start + n < single
            position = tl.load(order + place, mask=has, other=0).to(tl.int64)
            at = d_out + position[:, None] * d_out_row + i[None, :]
            total += tl.load(at, mask=has[:, None] & inside, other=0.0).to(WIDE)
    for start in range(0, tl.max(whole, 0), AHEAD):
        for n in tl.static_range(AHEAD):
            at = pieces + (piece + start + n).to(tl.int64)[:, None] * width + i[None, :]
            total += tl.load(at, mask=(start + n < whole)[:, None] & inside, other=0.0)
    to = d_table + row.to(tl.int64)[:, None] * width + i[None, :]
    tl.store(to, total.to(d_table.dtype.element_ty), mask=(row < rows)[:, None] & inside)


def gradient(
    device: int, d_out: Tensor, tokens: Tensor, d_table: Tensor, rows: int
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launches that write d_table (rows, width), contiguous, and their scratch tensors.

    d_out: (count, width), with a single row stride. tokens: (count,) integers below rows, contiguous.
    """
    count, width = d_out.shape
    block, _ = tile(width)
    tiles, owned, ranges = triton.cdiv(width, block), TILE // block, triton.cdiv(rows + 1, RANGE)
    listed, order, starts = (tokens.new_empty(n, dtype=torch.int32) for n in (count, count, rows + 1))
    bounds = tokens.new_empty(ranges, 2, dtype=torch.int32)
    pieces = d_out.new_empty(count // SPLIT, width, dtype=torch.promote_types(d_out.dtype, torch.float32))
    sorting = {"tokens": tokens, "listed": listed, "bounds": bounds, "rows": rows, "RANGE": RANGE}
    summing = {"d_out": d_out, "order": order, "pieces": pieces, "d_out_row": row_stride(d_out), "width": width}
    summing |= {"tiles": tiles, "SPLIT": SPLIT, "AHEAD": AHEAD, "BLOCK": block, "WIDE": wide(d_out.dtype)}
    return [
        Launch(embedding_list_kernel, (ranges, 1), sorting | {"count": count, "SCAN": SCAN}, {"num_warps": 8}),
        Launch(
            embedding_sort_kernel,
            (triton.cdiv(rows + 1, ROWS), 1),
            sorting | {"order": order, "starts": starts, "ROWS": ROWS, "LISTED": LISTED},
            {"num_warps": 4},
        ),
        Launch(embedding_pieces_kernel, (count // SPLIT * tiles, 1), summing | {"tokens": tokens}, {"num_warps": 1}),
        Launch(
            embedding_gradient_kernel,
            (triton.cdiv(rows, owned) * tiles, 1),
            summing | {"starts": starts, "d_table": d_table, "rows": rows, "ROWS": owned},
            {"num_warps": 4},
        ),
    ], {"listed": listed, "bounds": bounds, "order": order, "starts": starts, "pieces": pieces}
