"""Fully sharded data parallelism: unusual models, gathered memory over time, and misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model.parallel.fsdp_scenarios import NORMS, USES, Model

pytestmark = pytest.mark.parametrize(
    "where", ["ranks_by_size", pytest.param("gpu_ranks_by_size", marks=pytest.mark.gpu)]
)


@pytest.fixture
def ranks(where: str, request: pytest.FixtureRequest) -> Any:
    """Return the results of two ranks, on CPUs with gloo or on GPUs with NCCL."""
    return request.getfixturevalue(where)(2)


@pytest.mark.parametrize("use", USES)
def test_fsdp_trains_unusual_models_as_one_process(ranks: Any, use: str) -> None:
    """Also check that nothing stays gathered, except the root unit of a forward without backward."""
    for found in ranks.of("sharded_uses"):
        off, gathered_bytes = found[use]
        assert off <= (1e-3 if use == "autocast" else 5e-6)
        assert (gathered_bytes > 0) == (use == "a forward without backward")


def test_fsdp_computes_and_sends_in_the_compute_dtype(ranks: Any) -> None:
    """Compare with one process that casts weights and inputs, by the norm of the change in training."""
    for found in ranks.of("low_precision"):
        assert found["torch.float16"] <= 1e-2
        assert found["torch.bfloat16"] <= 5e-2


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float32"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_accept_and_return_the_compute_dtype(ranks: Any, norm: str, dtype: str) -> None:
    """Torch's norms compute in the dtype of their weights; this package's norm computes in fp32 internally."""
    for found in ranks.of("norms"):
        result = found[f"{norm} given {dtype}"]
        assert result["computes in"] == (dtype if norm == "ours" else "torch.float32")
        assert result["returns"] == dtype
        assert result["off"] <= (1e-2 if dtype == "torch.bfloat16" else 1e-5)


@pytest.mark.parametrize("use", ["", "a frozen block"])
def test_at_most_two_blocks_and_the_root_are_gathered(ranks: Any, use: str) -> None:
    """Unit 0 is the root, units 1 to 3 are the blocks; after the first forward the next unit is prefetched."""
    for found in ranks.of("gathered_over_time"):
        first, *later = found[use]
        backward = [("backward 2", [0, 2, 3]), ("backward 1", [0, 1, 2]), ("backward 0", [0, 1])]
        assert first["seen"] == [("forward 0", [0, 1]), ("forward 1", [0, 2]), ("forward 2", [0, 3]), *backward]
        for step in later:
            forward = [("forward 0", [0, 1, 2]), ("forward 1", [0, 2, 3]), ("forward 2", [0, 3])]
            assert step["seen"] == [*forward, *backward]
        assert all(step["after"] == 0 for step in (first, *later))


def test_each_unit_is_sent_in_one_collective(ranks: Any) -> None:
    """Gather the root once and each block twice, and reduce-scatter each once.

    One all-reduce sends the norms, another the flags of parameters with gradients.
    """
    order = ["gather"] * 4 + ["gather", "gather", "scatter", "gather", "scatter", "scatter", "scatter"]
    short = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "all_reduce"}
    for found in ranks.of("gathered_over_time"):
        for step in found[""]:
            assert [short[call.collective] for call in step["calls"]] == [*order, "all_reduce", "all_reduce"]


def test_rank_keeps_only_its_shards(ranks: Any) -> None:
    both = ranks.of("kept_parts")
    alone = Model("tied")
    for name, p in alone.named_parameters(remove_duplicate=False):
        shapes = [found["shapes"][name] for found in both]
        assert [len(shape) for shape in shapes] == [p.ndim, p.ndim]
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        assert elements == (2 * p.numel() if "norm" in name else p.numel())
        for found in both:
            torch.testing.assert_close(found["full"][name], p.detach(), rtol=0, atol=0)
            torch.testing.assert_close(found["loaded"][name], p.detach() + 1, rtol=0, atol=0)
    for found in both:
        assert found["made"] > 0
        assert found["left"] == 0


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        ("unknown_dtype", "unknown compute_dtype 'fp8'; did you mean fp"),
        ("outside", "Linear was called while the weights of Model were not gathered; call the wrapper"),
        (
            "parts_of_a_block",
            "Linear was called while the weights of Block were not gathered; call the wrapper of the model, and inside "
            "it each Block as a whole",
        ),
        ("moved", "a sharded model cannot be moved or cast; do that before it is wrapped"),
        ("unfrozen", "parameter blocks.1.norm.weight requires a gradient, but was frozen when"),
        ("backward_that_failed", "backward has not ended, or has failed; call zero_grad(), because"),
    ],
)
def test_misuse_of_a_sharded_model_raises_a_named_error(ranks: Any, misuse: str, message: str) -> None:
    for messages in ranks.of("sharded_misuses"):
        assert messages[misuse].startswith(message)
