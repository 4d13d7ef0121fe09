"""What the CUDA C++ forward's host code decides, without a GPU."""

from __future__ import annotations

from cs_systems.kernels.cuda.launch_forward import OPTIONS, WARP_ROWS, first_row


def test_no_warp_stores_from_a_row_below_0() -> None:
    """The copy engine answers such a store, as one of −19 to −4 of 333 causal queries, with an illegal instruction."""
    for rows in (128, 192):
        for seq_q in range(1, 1025):
            first = first_row(seq_q, rows)
            tiles = -(-seq_q // rows)
            assert first % WARP_ROWS == 0  # so a warp's rows are all below 0, and not stored, or none is
            assert -rows < first <= 0
            assert seq_q <= first + tiles * rows < seq_q + WARP_ROWS


def test_the_options_fit_shared_memory() -> None:
    assert all(options.shared_bytes(depth) <= 227 << 10 for depth, options in OPTIONS.items())
