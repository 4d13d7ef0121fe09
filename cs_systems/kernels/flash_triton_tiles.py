"""What the FlashAttention-2 kernels share: where a head's matrix begins, and how one tile of it is read and written.

A tile is (ROWS, BLOCK_D), BLOCK_D the power of two at or above D; what lies past `length` rows or D columns is read as 0.
"""

import triton
import triton.language as tl


@triton.jit
def head_pointer(tensor, strides, batch, head):
    """The first element of one head's (seq, D) matrix, in 64 bits: a tensor may hold more than 2**31 elements."""
    return tensor + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def _pointers(matrix, strides, start, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    # One 64-bit base for the tile, small offsets inside it: those stay 32 bits wide and do not change along the loop.
    first = matrix + tl.cast(start, tl.int64) * strides[2]
    return first + (tl.arange(0, ROWS)[:, None] * strides[2] + tl.arange(0, BLOCK_D)[None, :] * strides[3])


@triton.jit
def load_tile(
    matrix, strides, start, length, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK_ROWS: tl.constexpr
):
    pointers = _pointers(matrix, strides, start, ROWS, BLOCK_D)
    in_rows = (start + tl.arange(0, ROWS) < length)[:, None]
    in_columns = (tl.arange(0, BLOCK_D) < D)[None, :]
    if MASK_ROWS and D < BLOCK_D:
        return tl.load(pointers, mask=in_rows & in_columns, other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=in_rows, other=0.0)
    elif D < BLOCK_D:
        return tl.load(pointers, mask=in_columns, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(matrix, strides, start, length, tile, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    inside = (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(_pointers(matrix, strides, start, ROWS, BLOCK_D), tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def visible_keys(queries, keys, seq_k, offset, CAUSAL: tl.constexpr):
    """Which keys a query sees; `queries` and `keys` are indices that broadcast against each other."""
    visible = keys < seq_k
    if CAUSAL:
        visible = visible & (keys <= queries + offset)
    return visible


@triton.jit
def key_range(start, seq_k, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """For the queries start … start + BLOCK_M: (full, end). Key tiles before `full` are seen by every query, from `end` on by none."""
    end = seq_k
    full = seq_k
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(seq_k, start + BLOCK_M + offset))
        full = tl.maximum(0, tl.minimum(seq_k, start + 1 + offset))
    return full // BLOCK_N * BLOCK_N, end
