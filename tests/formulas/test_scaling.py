"""Tests of the limits of a feed-forward layer against the bytes that it sends and the FLOPs that it computes."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.formulas.scaling import MACHINES, RING_BYTES, feed_forward_limits, ring_times


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_at_its_limit_a_feed_forward_layer_sends_as_long_as_it_computes(element_bytes: int) -> None:
    tokens, d, d_ff, flops_per_s, bytes_per_s = 2**20, 2560, 10240, 989.5e12, 450e9
    limits = {
        (limit.strategy, limit.phase): limit.ranks
        for limit in feed_forward_limits(tokens, d_ff, element_bytes, flops_per_s, bytes_per_s)
    }
    weights, residual = 3 * d * d_ff * element_bytes, tokens * d * element_bytes

    def sends_as_long(ranks: float, flops: float, sent_bytes: float) -> Any:
        return sent_bytes / bytes_per_s == pytest.approx(flops / ranks / flops_per_s)

    forward, backward = 6 * tokens * d * d_ff, 12 * tokens * d * d_ff
    n = limits["ddp", "backward"]
    assert sends_as_long(n, backward, 2 * weights * (n - 1) / n)
    n = limits["fsdp", "forward and backward"]
    assert sends_as_long(n, forward, weights * (n - 1) / n)
    assert sends_as_long(n, backward, 2 * weights * (n - 1) / n)
    n = limits["tp", "forward"]
    assert sends_as_long(n, forward, 2 * residual * (n - 1) / n)
    n = limits["tp", "backward"]
    assert sends_as_long(n, backward, 2 * residual * (n - 1) / n)


def test_collectives_of_two_dimensions_one_after_the_other_reach_the_most_ranks_of_all_divisions() -> None:
    tokens, d_ff, ratio = 2**20, 10240, 450e9 / (2 * 989.5e12)
    limits = feed_forward_limits(tokens, d_ff, 2, 989.5e12, 450e9)
    at_once, apart = limits[-2].ranks, limits[-1].ranks
    room = 6 * tokens * d_ff * ratio + 3 * d_ff + 2 * tokens
    tried = [
        n * (room - 3 * d_ff * n) / (2 * tokens) for n in (room / (3 * d_ff) * part / 100 for part in range(1, 100))
    ]
    assert apart == pytest.approx(max(tried))
    assert at_once / 4 < apart < at_once


def test_ring_that_passes_whole_tensors_takes_half_its_ranks_times_as_long() -> None:
    rows = ring_times([2, 3, 16])
    assert [row["ranks"] for row in rows] == [2, 3, 16] * len(MACHINES)
    for row in rows:
        sent_s = RING_BYTES / MACHINES[row["machine"]][1]  # of one whole tensor
        assert row["whole_s"] == pytest.approx((row["ranks"] - 1) * sent_s)
        assert row["times"] == pytest.approx(row["ranks"] / 2)
        assert row["pieces_s"] < 2 * sent_s
