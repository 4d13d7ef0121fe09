"""Launcher of test ranks, which leaves no process behind; and checks of compositions before any rank starts."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.formulas.rank_layout import averages_after_backward, check_division, data_ranks, options_of, splits_of
from cs_systems.model.parallel import check, compose
from tests.model.parallel.launch import launch


def hang(rank: int, world_size: int, folder: Path) -> None:
    time.sleep(3600)


def die(rank: int, world_size: int, folder: Path) -> None:
    if rank == 1:
        sys.exit(7)
    time.sleep(3600)


def test_hanging_ranks_are_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] still ran after 0.5 s"):
        launch(hang, 2, tmp_path, limit_s=0.5)
    assert multiprocessing.active_children() == []


def test_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit codes by rank: \{1: 7\}"):
        launch(die, 2, tmp_path, limit_s=50)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("ddp_bucket", "unknown parallel strategy 'ddp_bucket'; did you mean ddp_bucketed"),
        ("ddp_bucketed+", "unknown parallel strategy ''"),
        (
            "ddp_flat+ddp_naive",
            "ddp_flat+ddp_naive cannot be combined, because ddp_flat and ddp_naive both divide the batch; choose one",
        ),
        ("ddp_flat+zero1+torch_zero", "zero1 and torch_zero both divide the optimizer; choose one"),
        ("ddp_flat+ddp_flat", "strategy ddp_flat+ddp_flat names a part twice; name each once"),
        ("ddp_flat+single", "because single divides nothing; leave out single"),
        (
            "zero1+tp",
            "zero1+tp cannot be combined, because zero1 does not support tp; leave out zero1 or tp, or use fsdp+tp "
            "with tp_degree",
        ),
        ("tp+tp", "strategy tp+tp names a part twice; name each once"),
        ("zero1", "zero1 alone does not average gradients over the ranks; use ddp_bucketed+zero1"),
    ],
)
def test_invalid_composition_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(name)
    assert complaint in str(caught.value)


def test_option_unknown_to_a_composition_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="ddp_bucketed\\+zero1 has no option 'bucket'; did you mean bucket_size_mb or last_bucket_mb"
    ):
        compose("ddp_bucketed+zero1", bucket=3)


@pytest.mark.parametrize("name", plugins.names("parallel"))
def test_declaration_read_from_file_matches_its_export(name: str) -> None:
    declared, strategy = plugins.declared("parallel", name), plugins.get("parallel", name)
    assert frozenset(declared.get("splits", {"batch"})) == strategy.splits
    assert declared.get("overlaps", False) == strategy.overlaps
    assert declared.get("options", {}) == strategy.options
    assert declared.get("compared") == strategy.compared


def test_tp_degree_without_tp_is_refused() -> None:
    with pytest.raises(ConfigError, match="which ddp_flat does not include; use ddp_flat\\+tp"):
        compose("ddp_flat", tp_degree=2)
    with pytest.raises(ConfigError, match="does not include; leave out tp_degree, or use fsdp\\+tp"):
        compose("ddp_bucketed+zero1", tp_degree=2)  # zero1 and tp cannot be combined


def test_two_dimensional_strategy_requires_tp_degree() -> None:
    strategy = compose("ddp_flat+tp")
    for use in (lambda: strategy.wrap(nn.Linear(2, 2)), lambda: strategy.part_of_batch(0, 4)):
        with pytest.raises(
            ConfigError, match="tp with another strategy requires tp_degree; set it to the number of ranks"
        ):
            use()
    with pytest.raises(
        ConfigError, match="with tp alone, which divides each block over all 4 ranks; leave out tp_degree"
    ):
        compose("tp", tp_degree=2).part_of_batch(0, 4)


def test_ranks_of_one_tp_group_take_the_same_rows() -> None:
    strategy = compose("ddp_flat+tp", tp_degree=2)
    assert [strategy.part_of_batch(rank, 4) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [compose("tp").part_of_batch(rank, 2) for rank in range(2)] == [(0, 1), (0, 1)]
    assert [compose("ddp_flat").part_of_batch(rank, 2) for rank in range(2)] == [(0, 2), (1, 2)]
    with pytest.raises(ConfigError, match="tp_degree 2 does not divide 3 ranks; choose tp_degree among 1, 3, or"):
        strategy.part_of_batch(0, 3)


@pytest.mark.parametrize(
    ("world_size", "tp_degree", "message"),
    [
        (
            4,
            None,
            "d_ff 30 is not divisible by world_size 4, over which tp divides each block; choose world_size among 1, 2",
        ),
        (
            8,
            4,
            "d_ff 30 is not divisible by tp_degree 4; choose tp_degree among 1, 2$",
        ),  # 3 and 6 do not divide 8 ranks
    ],
)
def test_indivisible_sizes_are_refused_before_any_process(world_size: int, tp_degree: int | None, message: str) -> None:
    check_division(num_heads=12, d_ff=30, world_size=6, tp_degree=tp_degree and 6)
    with pytest.raises(ConfigError, match=message):
        check_division(num_heads=12, d_ff=30, world_size=world_size, tp_degree=tp_degree)


def test_names_are_checked_without_torch() -> None:
    assert check("ddp_flat+zero1") == ["ddp_flat", "zero1"]
    with pytest.raises(ConfigError, match="unknown parallel strategy 'ddp'"):
        check("ddp+zero1")


@pytest.mark.parametrize(
    ("strategy", "world_size", "tp_degree", "ranks"),
    [("single", 1, None, 1), ("ddp_flat+zero1", 4, None, 4), ("tp", 4, None, 1), ("ddp_flat+tp", 4, 2, 2)],
)
def test_data_ranks_exclude_tensor_parallel_ranks(
    strategy: str, world_size: int, tp_degree: int | None, ranks: int
) -> None:
    config = {"strategy": strategy, "world_size": world_size, "tp_degree": tp_degree}
    assert data_ranks(config) == ranks
    assert data_ranks({}) == 1  # an old record without world size


def test_splits_and_options_of_a_composition_are_read_without_torch() -> None:
    assert splits_of("ddp_flat+zero1") == {"batch", "optimizer"}
    assert "bucket_size_mb" in options_of("ddp_bucketed+zero1")
    assert "bucket_size_mb" not in options_of("ddp_flat+zero1")


@pytest.mark.parametrize(
    ("strategy", "is_all"),
    [
        ("ddp_naive", True),
        ("ddp_flat", True),
        ("ddp_overlap", True),
        ("ddp_bucketed+zero1", True),
        ("zero1_flat", True),
        ("torch_ddp", False),
        ("fsdp", False),
        ("fsdp+tp", False),
        ("tp", False),
        ("single", False),
        ("no_such_file.py:MyDDP", True),
    ],
)
def test_strategies_that_average_after_backward_are_recognised(strategy: str, is_all: bool) -> None:
    assert averages_after_backward(strategy) is is_all
