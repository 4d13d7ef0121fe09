"""Launches of gated_forward.cu and gated_backward.cu: SwiGLU inside the products before and behind it."""

from __future__ import annotations

from torch import Tensor

from cs_systems.kernels.cuda.driver import Launch, tensor_map
from cs_systems.kernels.cuda.launch_product import (
    COLUMNS,
    ROWS,
    THREADS,
    ProductOptions,
    Sizes,
    summed_along_columns,
    summed_along_rows,
)
from cs_systems.kernels.driver import Address

NARROW, WIDE, BACKWARD = ProductOptions(cluster=1), ProductOptions(), ProductOptions(ahead=3)
WIDE_D = 2048
"""D from which forward takes WIDE: 9% less time for 2560 on one H200, and 5 to 8% more for 768 and 1280."""
RUN = 2
"""Rows that gated_backward.cu loads and finishes together."""


def gated_forward(
    x: Tensor, w: Tensor, both: Tensor, h: Tensor, multiprocessors: int, options: ProductOptions | None = None
) -> Launch:
    """Return the launch that writes both = x wᵀ and h.

    x is (tokens, D), whose rows may lie apart, w (2 F, D), both (tokens, 2 F), h (tokens, F): bfloat16, of widths that
    are multiples of 64.
    """
    options = options or (WIDE if x.shape[1] >= WIDE_D else NARROW)
    left = summed_along_rows("x", x, ROWS)
    right = summed_along_rows("w", w, COLUMNS // options.cluster)
    shape = (x.shape[0], w.shape[0])
    parameters = (
        options.products([left], [right], [shape], x.shape[1]),
        tensor_map("both", both[None, None], ROWS // 2),
        Address("h"),
        Sizes(*shape),
    )
    return _launch("gated_forward", options, False, 0, shape, multiprocessors, parameters)


def gated_backward(
    d_out: Tensor, w2: Tensor, both: Tensor, d_both: Tensor, multiprocessors: int, options: ProductOptions = BACKWARD
) -> Launch:
    """Return the launch that writes d_both (tokens, 2 F) from both, for the gradient d_out w2 of h.

    d_out is (tokens, D), whose rows may lie apart, w2 (D, F): bfloat16, widths multiples of 64.
    """
    left = summed_along_rows("d_out", d_out, ROWS)
    right = summed_along_columns("w2", w2, options.depth, COLUMNS // options.cluster)
    shape = (d_out.shape[0], w2.shape[1])
    parameters = (
        options.products([left], [right], [shape], d_out.shape[1]),
        Address("both"),
        Address("d_both"),
        Sizes(*shape),
    )
    return _launch("gated_backward", options, True, RUN * 4 * COLUMNS, shape, multiprocessors, parameters)


def _launch(
    name: str, options: ProductOptions, right_trans: bool, row_bytes: int, shape: tuple[int, int], multiprocessors: int,
    parameters: tuple[object, ...],
) -> Launch:  # fmt: skip
    blocks = options.blocks(options.tiles([shape]), multiprocessors)
    macros = options.macros(False, right_trans)
    return Launch(name, name, macros, blocks, THREADS, options.shared_bytes(row_bytes), parameters)
