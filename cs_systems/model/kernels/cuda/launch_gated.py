"""Launches of gated_forward.cu and gated_backward.cu: SwiGLU fused into the products before and after it."""

from __future__ import annotations

from torch import Tensor

from cs_systems.model.kernels.cuda.driver import Launch, tensor_map
from cs_systems.model.kernels.cuda.launch_product import (
    ROWS,
    THREADS,
    ProductOptions,
    Sizes,
    summed_along_columns,
    summed_along_rows,
)
from cs_systems.model.kernels.driver import Address

NARROW, WIDE = ProductOptions(cluster=1), ProductOptions()
WIDE_D = 2048
"""D from which forward takes WIDE: 9% less time for 2560 on one H200, but 5 to 8% more for 768 and 1280."""
RUN = 2
"""Rows that gated_backward.cu loads and finishes together."""
BACKWARD = {ProductOptions(ahead=3): 1.0, ProductOptions(columns=128, stages=4, ahead=6, cluster=1): 0.59}
"""Options of backward, and the time of their tiles, relative to each other; measured on one H100."""


def gated_forward(x: Tensor, w: Tensor, both: Tensor, h: Tensor, multiprocessors: int) -> Launch:
    """Return the launch that writes both = x wᵀ and h.

    x is (tokens, D) with any row stride, w (2 F, D), both (tokens, 2 F), h (tokens, F): bfloat16, with widths that are
    multiples of 64.
    """
    options = WIDE if x.shape[1] >= WIDE_D else NARROW
    left = summed_along_rows("x", x, ROWS)
    right = summed_along_rows("w", w, options.columns // options.cluster)
    shape = (x.shape[0], w.shape[0])
    parameters = (
        options.products([left], [right], [shape], x.shape[1]),
        tensor_map("both", both[None, None], ROWS // 2),
        Address("h"),
        Sizes(*shape),
    )
    return _launch("gated_forward", options, False, 0, shape, multiprocessors, parameters)


def gated_backward(d_out: Tensor, w2: Tensor, both: Tensor, d_both: Tensor, multiprocessors: int) -> Launch:
    """Return the launch that writes d_both (tokens, 2 F) from both, for the gradient d_out w2 of h.

    d_out is (tokens, D) with any row stride, w2 (D, F): bfloat16, widths multiples of 64.
    """
    shape = (d_out.shape[0], w2.shape[1])
    options = backward_options(shape, multiprocessors)
    left = summed_along_rows("d_out", d_out, ROWS)
    right = summed_along_columns("w2", w2, options.depth, options.columns // options.cluster)
    parameters = (
        options.products([left], [right], [shape], d_out.shape[1]),
        Address("both"),
        Address("d_both"),
        Sizes(*shape),
    )
    return _launch("gated_backward", options, True, RUN * 4 * options.columns, shape, multiprocessors, parameters)


def backward_options(shape: tuple[int, int], multiprocessors: int) -> ProductOptions:
    """Return the options with the least time for dh of this shape.

    A block computes its tiles one after another, and the work after the last one is not hidden, so smaller tiles are
    faster if a block has few. 128 columns take 4 to 13% less time for 2048 tokens of small, medium and large on one
    H100.
    """

    def time(options: ProductOptions) -> float:
        rounds = -(-options.tiles([shape]) // (multiprocessors // options.cluster))
        return BACKWARD[options] * (rounds + 1)

    return min(BACKWARD, key=time)


def _launch(
    name: str, options: ProductOptions, right_trans: bool, row_bytes: int, shape: tuple[int, int], multiprocessors: int,
    parameters: tuple[object, ...],
) -> Launch:  # fmt: skip
    blocks = options.blocks(options.tiles([shape]), multiprocessors)
    macros = options.macros(False, right_trans)
    return Launch(name, name, macros, blocks, THREADS, options.shared_bytes(row_bytes), parameters)
