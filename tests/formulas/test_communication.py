"""Tests of the formulas for bytes that ranks send and FLOPs that they execute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import Mode, Precision, preset
from cs_systems.formulas.communication import (
    Payload,
    averaging_bytes,
    fully_sharded_bytes,
    owners_bytes,
    payload,
    tensor_parallel_bytes,
    tensor_rank_cost,
)
from cs_systems.formulas.cost import FULL_MATRIX, parameter_count, step_cost

VOLUMES = (averaging_bytes, owners_bytes, fully_sharded_bytes, tensor_parallel_bytes)


@given(
    st.builds(Payload, st.integers(10**6, 10**9), st.integers(0, 10**6), st.integers(1, 50), st.integers(1, 10**6)),
    st.integers(1, 1000),
)
def test_volume_is_zero_for_one_rank_and_grows_with_ranks(it: Payload, ranks: int) -> None:
    for volume in VOLUMES:
        assert volume(it, 1) == 0
        assert volume(it, ranks) < volume(it, ranks + 1)


@pytest.mark.parametrize("size", ["tiny", "2.7B"])
def test_payload_counts_all_parameters_and_divides_over_tensor_ranks(size: str) -> None:
    model = preset(size)
    whole = payload(model, tokens=2048, parameter_bytes=4, activation_bytes=2)
    assert whole.parameter_bytes == 4 * parameter_count(model)
    assert whole.residual_bytes == 2 * 2048 * model.d_model
    part = whole.on_tensor_rank(4)
    replicated = whole.parameter_bytes - whole.divided_bytes
    assert 4 * (part.parameter_bytes - replicated) == whole.divided_bytes == 4 * part.divided_bytes


@pytest.mark.parametrize("checkpoint", ["none", "every:1"])
def test_tensor_ranks_divide_blocks_and_each_run_the_head(checkpoint: str) -> None:
    model, tokens, ranks = preset("tiny"), 2 * 64, 2
    whole = step_cost(model, 2, 64, Mode.TRAIN_STEP, FULL_MATRIX, Precision.FP32, checkpoint)
    part = tensor_rank_cost(whole, model, tokens, ranks)
    head = 2 * tokens * model.d_model * model.vocab_size
    for phase, times in (("forward", 1), ("backward", 2), ("loss", 0), ("optimizer", 0)):
        mine, total = part[phase], whole[phase]
        assert ranks * mine.model_flops == total.model_flops  # type: ignore[operator]
        assert ranks * mine.hardware_flops == total.hardware_flops + times * (ranks - 1) * head  # type: ignore[operator]
    assert (part["forward"].bytes, part["loss"].bytes) == (None, whole["loss"].bytes)


def test_tensor_ranks_each_run_the_head_in_the_loss() -> None:
    model, tokens, ranks = preset("tiny"), 2 * 64, 2
    whole = step_cost(model, 2, 64, Mode.TRAIN_STEP, FULL_MATRIX, Precision.FP32, head_in_loss=True)
    part = tensor_rank_cost(whole, model, tokens, ranks)
    assert part["loss"].hardware_flops == whole["loss"].hardware_flops == 6 * tokens * model.d_model * model.vocab_size
    assert ranks * part["forward"].hardware_flops == whole["forward"].hardware_flops  # type: ignore[operator]
