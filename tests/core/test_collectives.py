"""Sizes of a collective, its bus bandwidth, and the sizes that ranks can share."""

from __future__ import annotations

import json

import pytest

from cs_systems.config import ConfigError, RunConfig, describe
from cs_systems.core.collectives import COLLECTIVES, DIVIDED, ELEMENT_BYTES, CollectiveShape, busbw, calls_for
from cs_systems.measure.runtime.sweep import run


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("broadcast", 1.0),
        ("all_to_all", 0.75),
    ],
)
def test_busbw_follows_nccl_tests(collective: str, factor: float) -> None:
    """With 4 ranks, 1 GB in 0.01 s is an algbw of 100 GB/s."""
    assert busbw(collective, 10**9, 4, 0.01) == pytest.approx(factor * 100e9)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_has_no_bus_bandwidth(collective: str) -> None:
    assert busbw(collective, 10**9, 1, 0.01) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"collective": "allreduce"}, "unknown collective 'allreduce'; did you mean all_reduce"),
        ({"dtype": "float32"}, "unknown dtype 'float32'; did you mean fp32? The names are fp32, bf16"),
        ({"size_bytes": 0}, "size_bytes is 0; it must be at least 1"),
        ({"size_bytes": 1.5}, "size_bytes is 1.5; it must be a whole number"),
        ({"calls": 0}, "calls is 0; it must be at least 1"),
    ],
)
def test_invalid_shape_is_refused_with_remedy(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        CollectiveShape(**given)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_size_that_ranks_cannot_divide_names_the_nearest(collective: str) -> None:
    shape = CollectiveShape(collective, 1024)
    shape.check(2)
    if collective not in DIVIDED:
        return shape.check(3)
    with pytest.raises(ConfigError) as error:
        shape.check(3)
    assert str(error.value) == (
        f"{collective} of 1,024 bytes is not a whole number of fp32 elements for each of 3 ranks; give 1020B or 1032B"
    )
    return None


def test_size_of_partial_elements_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        CollectiveShape("all_reduce", 3).check(1)
    assert str(error.value) == "all_reduce of 3 bytes is not a whole number of fp32 elements; give 4B"


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_held_bytes_count_sent_and_received_tensors(collective: str, dtype: str) -> None:
    held = {"all_gather": 1024 + 256, "reduce_scatter": 1024 + 256, "all_to_all": 2048}
    assert CollectiveShape(collective, 1024, dtype).held_bytes(4) == held.get(collective, 1024)


@pytest.mark.parametrize(("size", "calls"), [(1, 20), (2**20, 20), (16 * 2**20, 4), (2**30, 1), (2**40, 1)])
def test_calls_per_sample_decrease_with_size(size: int, calls: int) -> None:
    assert calls_for(size) == calls


def test_shape_round_trips_json_and_changes_the_key() -> None:
    config = RunConfig(workload="collective", collective=CollectiveShape("broadcast", 4096, "bf16", 20))
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert RunConfig(workload="collective").collective == CollectiveShape()
    assert config.key() != RunConfig(workload="collective").key()


def test_collective_with_another_workload_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"collective applies only to collective and a workload of your own, .*; leave out collective"
    ):
        RunConfig(collective=CollectiveShape("broadcast"))


def test_collective_in_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="a distributed cell needs its own processes; leave out in_process=True"):
        run(RunConfig(workload="collective"), in_process=True)


@pytest.mark.parametrize(
    ("size", "message"), [(2**30, "1 GiB"), (3 * 2**20, "3 MiB"), (1536, "1,536 B"), (2048, "2 KiB"), (4, "4 B")]
)
def test_describe_names_the_collective_call(size: int, message: str) -> None:
    config = RunConfig(workload="collective", collective=CollectiveShape("all_to_all", size, "int8"))
    assert f"all_to_all {message} int8" in describe(config)
