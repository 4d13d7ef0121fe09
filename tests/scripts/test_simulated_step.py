"""Tests of simulated steps on N GPUs against bounds, closed forms and formulas for sent bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import preset
from cs_systems.formulas.communication import averaging_bytes, fully_sharded_bytes, payload, tensor_parallel_bytes
from scripts.studies._simulated_step import (
    DATA,
    TENSOR,
    Cluster,
    Layout,
    Sharing,
    Step,
    binding_ranks,
    binding_tensor_ranks,
    one_gpu_s,
    step,
)

CLUSTER = Cluster(400e12, 450e9, 400e9, 10e-6)
AVERAGED, SHARDED = Sharing.AVERAGED, Sharing.SHARDED

seconds = st.floats(0, 10).map(lambda x: round(x, 6))
steps = st.builds(
    Step,
    blocks=st.integers(1, 12),
    block_s=seconds,
    head_s=seconds,
    tensor_s=seconds,
    gather_s=seconds,
    gather_rest_s=seconds,
    reduce_s=seconds,
    reduce_head_s=seconds,
    reduce_rest_s=seconds,
    optimizer_s=seconds,
)


@given(steps)
def test_simulated_step_is_between_full_overlap_and_none(it: Step) -> None:
    simulated = it.simulate().makespan_s
    tensor = 2 * it.blocks * it.tensor_s
    in_a_row = 3 * it.forward_s + tensor + sum(it.sent_s) + it.optimizer_s
    assert it.closed_form_s() * (1 - 1e-9) <= simulated <= in_a_row * (1 + 1e-9)
    assert simulated >= max(3 * it.forward_s + tensor + it.optimizer_s, sum(it.sent_s)) * (1 - 1e-9)


@given(steps)
def test_step_without_sending_or_without_computing_matches_closed_form(it: Step) -> None:
    alone = Step(it.blocks, it.block_s, it.head_s, it.tensor_s, optimizer_s=it.optimizer_s)
    assert alone.simulate().makespan_s == pytest.approx(alone.closed_form_s())
    sends = replace(it, block_s=0.0, head_s=0.0, tensor_s=0.0, optimizer_s=0.0)
    assert sends.simulate().makespan_s == pytest.approx(sum(it.sent_s)) == pytest.approx(sends.closed_form_s())


@given(st.integers(1, 30), seconds, seconds)
def test_averaging_equal_blocks_matches_closed_form(blocks: int, computing: float, sent: float) -> None:
    """With one bucket a block, the exposed time of buckets gives f = max(Lb + c, b + Lc)."""
    it = Step(blocks, computing / 2, 0.0, reduce_s=sent)
    backward = max(blocks * computing + sent, computing + blocks * sent)
    assert it.simulate().makespan_s == pytest.approx(blocks * computing / 2 + backward)


@given(st.integers(1, 30), seconds, seconds)
def test_gather_overlaps_with_previous_block(blocks: int, computing: float, gather: float) -> None:
    """A sharded forward waits for the first gather; then each block takes the longer of computing and gathering."""
    it = Step(blocks, computing, 0.0, gather_s=gather)
    forward = gather + (blocks - 1) * max(computing, gather) + computing
    assert it.simulate().ends_s["forward head"] == pytest.approx(forward)


@pytest.mark.parametrize(("computing", "sent"), [(1.0, 0.5), (0.5, 1.0)])
def test_closed_form_matches_simulation_with_many_blocks(computing: float, sent: float) -> None:
    for it in (Step(400, computing, 0.0, reduce_s=sent), Step(400, computing, 0.0, gather_s=sent, reduce_s=sent)):
        assert it.simulate().makespan_s == pytest.approx(it.closed_form_s(), rel=0.01)


def sent_bytes(line: Any, stream: str, bandwidth: float) -> float:
    return line.busy_s.get(stream, 0.0) * bandwidth  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", ["medium", "2.7B"])
@pytest.mark.parametrize("layout", [Layout(s, d, t) for s in Sharing for d, t in ((4, 1), (2, 4), (1, 4))], ids=repr)
def test_simulated_step_sends_bytes_of_formulas(size: str, layout: Layout) -> None:
    """Within a node and without latency, the bytes are time × bandwidth, up to how the formula counts norms."""
    model, cluster = preset(size), replace(CLUSTER, latency_s=0.0)
    line = step(model, layout, 4, 512, cluster, parameter_bytes=4).simulate()
    whole = payload(model, 4 * 512, 4, 2)
    left = whole.on_tensor_rank(layout.tp)
    data = (fully_sharded_bytes if layout.sharing is SHARDED else averaging_bytes)(left, layout.dp)
    assert sent_bytes(line, DATA, cluster.link_bytes_per_s) == pytest.approx(data, rel=1e-3)
    assert sent_bytes(line, TENSOR, cluster.link_bytes_per_s) == pytest.approx(tensor_parallel_bytes(whole, layout.tp))


def test_step_of_one_rank_takes_time_of_one_gpu() -> None:
    model = preset("medium")
    for sharing in Sharing:
        it = step(model, Layout(sharing), 4, 512, CLUSTER, parameter_bytes=4)
        assert it.simulate().makespan_s == pytest.approx(one_gpu_s(model, 4, 512, CLUSTER))


def test_group_bandwidth_is_link_in_node_and_network_share_beyond() -> None:
    slow = replace(CLUSTER, network_bytes_per_s=50e9)
    assert slow.bandwidth_bytes_per_s(8) == slow.bandwidth_bytes_per_s(2, 4) == 450e9
    assert slow.bandwidth_bytes_per_s(16) == 50e9
    assert slow.bandwidth_bytes_per_s(4, 4) == 12.5e9
    assert slow.bandwidth_bytes_per_s(2, 16) == 6.25e9
    assert slow.collective_s(50e9, 16) == pytest.approx(1 + 4 * slow.latency_s)
    assert slow.collective_s(1e9, 1) == 0.0


@pytest.mark.parametrize("layout", [Layout(AVERAGED), Layout(SHARDED), Layout(SHARDED, tp=4)], ids=repr)
def test_communication_takes_as_long_as_computing_at_binding_ranks(layout: Layout) -> None:
    """At that number of ranks, the backward of a block computes for as long as it sends."""
    model, cluster, rows = preset("2.7B"), replace(CLUSTER, latency_s=0.0), 2**14
    ranks = binding_ranks(model, layout.tp, rows, 512, cluster, parameter_bytes=2)
    it = step(model, replace(layout, dp=round(ranks)), rows / ranks, 512, cluster, parameter_bytes=2)
    assert it.gather_s + it.reduce_s == pytest.approx(2 * it.block_s, rel=0.02)


def test_tensor_all_reduces_take_as_long_as_computing_at_binding_ranks() -> None:
    model, cluster = preset("2.7B"), replace(CLUSTER, latency_s=0.0, gpus_per_node=64)
    ranks = binding_tensor_ranks(model, 4, 512, cluster)
    it = step(model, Layout(AVERAGED, tp=round(ranks)), 4, 512, cluster, parameter_bytes=2)
    assert 2 * it.tensor_s == pytest.approx(3 * it.block_s, rel=0.05)
    assert ranks == pytest.approx(binding_tensor_ranks(model, 16, 512, cluster))


def test_layout_string_is_strategy_name() -> None:
    assert [str(Layout(SHARDED, 4, 2)), str(Layout(AVERAGED, 1, 8)), str(Layout(AVERAGED, 8))] == [
        "fsdp+tp",
        "tp",
        "ddp",
    ]
