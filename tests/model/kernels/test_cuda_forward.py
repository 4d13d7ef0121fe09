"""Tests of the host code of the CUDA C++ forward, without a GPU."""

from __future__ import annotations

from cs_systems.model.kernels.cuda.launch_forward import OPTIONS, WARP_ROWS, first_row


def test_first_row_is_aligned_so_that_no_warp_stores_across_row_0() -> None:
    """The copy engine fails with an illegal instruction if a store begins below row 0 and ends above."""
    for rows in (128, 192):
        for seq_q in range(1, 1025):
            first = first_row(seq_q, rows)
            tiles = -(-seq_q // rows)
            assert first % WARP_ROWS == 0  # so all rows of a warp are below 0 and not stored, or none is
            assert -rows < first <= 0
            assert seq_q <= first + tiles * rows < seq_q + WARP_ROWS


def test_options_of_each_kernel_fit_shared_memory() -> None:
    assert all(options.shared_bytes(depth) <= 227 << 10 for depth, options in OPTIONS.items())
