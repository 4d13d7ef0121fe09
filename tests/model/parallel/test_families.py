"""Tests of every strategy with foreign models against one process: losses, gradients, parameters, memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from cs_systems.formulas.communication import Payload
from tests.model.parallel.conftest import Ranks
from tests.model.parallel.family_scenarios import AVAILABLE, FEW, pairs, run_family_rank, train_family_alone
from tests.model.parallel.ranks import composed

LIMIT_S = 100.0  # each rank imports transformers, which is slow on a busy machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
alone = cache(train_family_alone)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("families"), run_family_rank, LIMIT_S)


def close(got: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(got, expected, **({"rtol": 1e-4, "atol": 1e-6} | tolerance))


@pytest.mark.parametrize(("name", "family"), pairs())
def test_strategy_trains_a_foreign_model_as_one_process(two_ranks: Ranks, name: str, family: str) -> None:
    """Compare losses, the first step, which is proportional to the gradients, and the last."""
    expected = alone(family, 2)
    for rank, found in enumerate(two_ranks.of(f"{name}-{family}")):
        close(found["losses"], [losses[rank] for losses in expected["losses"]])
        for got, wanted in zip(found["after"], expected["after"], strict=True):
            assert got.keys() == wanted.keys()
            close(got, wanted)


COUNTED = [(name, family) for name, family in pairs() if composed(name).counted and name != "fsdp"]


@pytest.mark.parametrize(("name", "family"), COUNTED)
def test_sent_bytes_of_a_foreign_model_match_the_formula(two_ranks: Ranks, name: str, family: str) -> None:
    """Allow a flag for each parameter, and the gaps of flat layouts."""
    formula = composed(name).sent_bytes
    assert formula is not None
    for found in two_ranks.of(f"{name}-{family}"):
        expected = formula(Payload(found["trained_bytes"]), 2)
        assert 0 <= found["sent_bytes"] - expected <= (1 + 2 * 16) * len(found["sizes"])


@pytest.mark.parametrize("family", AVAILABLE)
def test_fsdp_shards_every_parameter_of_a_foreign_model(two_ranks: Ranks, family: str) -> None:
    """Allow a gap of 16 bytes after each parameter and at the end of each rank's part."""
    ranks = two_ranks.of(f"fsdp-{family}")
    sizes = ranks[0]["sizes"]
    for found in ranks:
        assert abs(found["kept_bytes"] - sum(sizes) / 2) <= 16 * (len(sizes) + found["units"])
        assert found["gathered_bytes"] == 0


@pytest.mark.parametrize(
    ("family", "units"), [("llama", 3), ("gpt2", 3), ("t5", 5), ("resnet", 4), ("unet", 5), ("lstm", 1)]
)
def test_fsdp_gathers_one_block_of_a_foreign_model_at_a_time(two_ranks: Ranks, family: str, units: int) -> None:
    """Count the root unit, which has the rest, too."""
    if family not in AVAILABLE:
        pytest.skip("needs a package that is not installed")
    assert [found["units"] for found in two_ranks.of(f"fsdp-{family}")] == [units, units]


def test_fsdp_trains_checkpointed_blocks_to_the_same_parameters(two_ranks: Ranks) -> None:
    for found in two_ranks.of("checkpointed"):
        close(found["every:1"], found["none"])


@pytest.mark.parametrize("family", AVAILABLE)
def test_fsdp_trains_a_foreign_model_in_bf16(two_ranks: Ranks, family: str) -> None:
    """Compare with fp32 by bf16's rounding; norms and single parameters are sent in fp32."""
    expected = alone(family, 2)["losses"]
    for rank, found in enumerate(two_ranks.of("in_bf16")):
        close(found[family], [losses[rank] for losses in expected], rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("name", ["tp", "fsdp+tp"])
def test_tensor_parallelism_refuses_a_foreign_model(two_ranks: Ranks, name: str, family: str) -> None:
    for found in two_ranks.of("refused"):
        message = found[f"{name}-{family}"]
        assert message.startswith("ConfigError: tp requires the attention or feed-forward blocks of BasicTransformerLM")
        assert message.endswith("use fsdp or ddp_bucketed")


def test_torch_fsdp2_refuses_a_parameter_without_dimensions(two_ranks: Ranks) -> None:
    for found in two_ranks.of("refused"):
        assert found["torch_fsdp2-scalar"] == (
            "ConfigError: torch_fsdp2 cannot shard parameter 0, which has no dimensions; use fsdp"
        )
