"""Test of the Triton kernels around the Gluon backward; a process with Triton's interpreter runs this file."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
# seq_q, d_head, padded d_head
CASES = ((200, 64, 64), (130, 128, 128), (64, 96, 128), (5, 32, 64))
HEADS, SCALE, BLOCK, PADDING = 2, 0.5, 64, 128


def test_row_kernels_sum_rows_and_reorder_dq() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]


def check_prepare(seq: int, d_head: int, depth: int) -> None:
    from cs_systems.model.kernels.gluon.rows import flash_prepare_kernel

    padded = -(-seq // PADDING) * PADDING
    blocks = padded // BLOCK
    o, do = torch.randn(2, 1, HEADS, seq, d_head)
    lse = torch.randn(1, HEADS, seq)
    lse[0, 0, 0] = -torch.inf
    lse_log2, delta = torch.full((2, HEADS, padded), torch.nan)
    dq = torch.full((HEADS, padded, depth), torch.nan)
    flash_prepare_kernel[(HEADS * blocks, 1)](
        o, do, lse, lse_log2, delta, dq, o.stride(), do.stride(), HEADS, seq, padded, blocks, d_head, depth, BLOCK
    )
    torch.testing.assert_close(delta[:, :seq], (o * do).sum(-1)[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse_log2[:, 1:seq], lse[0, :, 1:] / torch.tensor(2.0).log())
    assert lse_log2[0, 0] == torch.inf  # a row without visible keys has weights of 0
    assert (lse_log2[:, seq:] == torch.inf).all()
    assert not dq.any()


def check_finish(seq: int, d_head: int, depth: int) -> None:
    from cs_systems.model.kernels.gluon.rows import ORDER, flash_finish_kernel

    padded = -(-seq // PADDING) * PADDING
    place = torch.arange(BLOCK * 64)
    row, column = (sum((place >> bit & 1) * step[axis] for bit, step in enumerate(ORDER)) for axis in (0, 1))
    gradient = torch.randn(HEADS, padded, depth)
    tiles = gradient.reshape(HEADS, padded // BLOCK, BLOCK, depth // 64, 64).transpose(2, 3)
    summed = tiles[..., row, column].contiguous()
    dq = torch.full((1, HEADS, seq, d_head), torch.nan)
    blocks = -(-seq // BLOCK)
    flash_finish_kernel[(HEADS * blocks * (depth // 64), 1)](
        summed, dq, dq.stride(), HEADS, seq, padded, blocks, SCALE, d_head, depth, BLOCK
    )
    torch.testing.assert_close(dq[0], gradient[:, :seq, :d_head] * SCALE)


if __name__ == "__main__":
    for case in CASES:
        check_prepare(*case)
        check_finish(*case)
