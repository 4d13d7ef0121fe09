"""Tests of the memory formulas of a rank, against the published multiples of Ψ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import RunConfig, preset
from cs_systems.formulas.cost import FULL_MATRIX, parameter_count
from cs_systems.formulas.memory.model import step_memory
from cs_systems.formulas.memory.ranks import STAGES, of_a_rank, state_by_stage, step_memory_of_a_rank

EVERYTHING = {"batch", "optimizer", "gradients", "parameters"}


@pytest.mark.parametrize(
    ("splits", "multiples"),
    [
        ({"batch"}, (1, 1, 2, 4)),
        ({"batch", "optimizer"}, (1, 1, 2, 3)),
        ({"batch", "optimizer", "gradients"}, (1, 1, 1.5, 2.5)),
        (EVERYTHING, (0.5, 0.5, 1, 2)),
    ],
)
def test_state_of_two_ranks_is_published_multiple_of_parameters(splits: set[str], multiples: tuple[float, ...]) -> None:
    found = state_by_stage(1000, splits, 2)
    assert tuple(sum(found[stage].values()) / 1000 for stage in STAGES) == multiples


@given(st.integers(1, 10**9), st.integers(1, 8), st.sets(st.sampled_from(sorted(EVERYTHING))))
def test_shards_of_all_ranks_sum_to_whole_state(size: int, world_size: int, splits: set[str]) -> None:
    components = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), size)
    for name, part in of_a_rank(components, splits, world_size).items():
        assert size <= part * world_size < size + world_size or part == size, name
    assert of_a_rank(components, splits, 1) == components


def test_rank_peak_excludes_optimizer_state_of_other_ranks() -> None:
    config = replace(RunConfig(model=preset("tiny")), device="cpu")
    whole = step_memory(config, FULL_MATRIX)
    part = step_memory_of_a_rank(whole, {"batch", "optimizer"}, 2)
    parameters = 4 * parameter_count(config.model)
    assert whole.instants["optimizer"]["optimizer_state"] == 2 * parameters
    saved = sum(whole.instants["optimizer"].values()) - sum(part.instants["optimizer"].values())
    assert saved == parameters
    assert step_memory_of_a_rank(whole, EVERYTHING, 1).peak_bytes == whole.peak_bytes


def test_gradients_in_buckets_take_no_extra_memory() -> None:
    """DDP on gloo held Ψ more after backward than between steps; with bucket views it held no more."""
    config = replace(RunConfig(model=preset("tiny")), device="cpu")
    whole = step_memory(config, FULL_MATRIX)
    parameters = 4 * parameter_count(config.model)
    for in_buckets, expected_extra in ((False, parameters), (True, 0)):
        part = step_memory_of_a_rank(whole, {"batch"}, 2, 1.0, gradients_in_buckets=in_buckets)
        more = {name: sum(part.instants[name].values()) - sum(whole.instants[name].values()) for name in part.instants}
        assert more["loss"] == parameters
        assert more["optimizer"] == expected_extra
