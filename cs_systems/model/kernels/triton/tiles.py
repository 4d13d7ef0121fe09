# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tile access and key visibility shared by the FlashAttention-2 kernels.

A tile is (ROWS, BLOCK_D), BLOCK_D the smallest power of two at or above D. Elements past `length` rows or D columns are
read as 0 and not written.
"""

import triton
import triton.language as tl


@triton.jit
def _pointers(tensor, strides, batch, head, start, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    # One 64-bit base per tile, because a tensor may hold more than 2**31 elements; the offsets inside it stay 32 bits
    # wide and do not change in a loop.
    matrix = tensor + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    first = matrix + tl.cast(start, tl.int64) * strides[2]
    return first + (tl.arange(0, ROWS)[:, None] * strides[2] + tl.arange(0, BLOCK_D)[None, :] * strides[3])


@triton.jit
def load_tile(
    tensor, strides, batch, head, start, length,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Load rows start … start + ROWS of one head, from a pointer or, through TMA, from a tensor descriptor."""
    # branches instead of early returns, because Triton compiles the code after a `return` inside an `if`
    if isinstance(tensor, tl.tensor_descriptor):
        tile = tensor.load([batch, head, start, 0]).reshape([ROWS, BLOCK_D])  # gives 0 outside by itself
    else:
        pointers = _pointers(tensor, strides, batch, head, start, ROWS, BLOCK_D)
        in_rows = (start + tl.arange(0, ROWS) < length)[:, None]
        in_columns = (tl.arange(0, BLOCK_D) < D)[None, :]
        if MASK_ROWS and D < BLOCK_D:
            tile = tl.load(pointers, mask=in_rows & in_columns, other=0.0)
        elif MASK_ROWS:
            tile = tl.load(pointers, mask=in_rows, other=0.0)
        elif D < BLOCK_D:
            tile = tl.load(pointers, mask=in_columns, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def load_row(tensor, row, row_stride, start, length, COLUMNS: tl.constexpr):
    """Load elements start … start + COLUMNS of one row of `length` elements, 0 past its end.

    tensor: a pointer or a descriptor.
    """
    if isinstance(tensor, tl.tensor_descriptor):
        values = tensor.load([row, start]).reshape([COLUMNS])
    else:
        columns = start + tl.arange(0, COLUMNS)
        values = tl.load(tensor + tl.cast(row, tl.int64) * row_stride + columns, mask=columns < length, other=0.0)
    return values


@triton.jit
def store_row(tensor, row, row_stride, start, length, values, COLUMNS: tl.constexpr):
    columns = start + tl.arange(0, COLUMNS)
    tl.store(tensor + tl.cast(row, tl.int64) * row_stride + columns, values, mask=columns < length)


@triton.jit
def store_tile(
    tensor, strides, batch, head, start, length, tile, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    inside = (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    pointers = _pointers(tensor, strides, batch, head, start, ROWS, BLOCK_D)
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def row_range(starts, index):
    """Return (the first row of a packed sequence, the number of its rows)."""
    first = tl.load(starts + index)
    return first, tl.load(starts + index + 1) - first


@triton.jit
def shifted(tensor, strides, rows):
    """Return the pointer advanced by `rows` rows."""
    return tensor + tl.cast(rows, tl.int64) * strides[2]


@triton.jit
def visible_keys(queries, keys, seq_k, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the mask of the keys that a query sees; `queries` and `keys` are indices that broadcast."""
    visible = keys < seq_k
    if CAUSAL:
        visible = visible & (keys <= queries + offset)
    if WINDOWED:
        visible = visible & (keys > queries + offset - window)
    return visible


@triton.jit
def key_range(
    start, seq_k, offset, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return (begin, full, full_end, end) for the queries of a tile.

    All see the keys from `full` to before `full_end`; none sees those before `begin` or from `end` on.
    """
    begin = 0
    full = 0
    full_end = seq_k
    end = seq_k
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(seq_k, start + BLOCK_M + offset))
        full_end = tl.maximum(0, tl.minimum(seq_k, start + 1 + offset))
    full_end = full_end // BLOCK_N * BLOCK_N
    if WINDOWED:
        begin = tl.maximum(0, start + offset - window + 1) // BLOCK_N * BLOCK_N
        full_end = tl.maximum(begin, full_end)
        full = tl.cdiv(tl.maximum(0, start + BLOCK_M + offset - window), BLOCK_N) * BLOCK_N
        full = tl.minimum(tl.maximum(begin, full), full_end)
    return begin, full, full_end, end
