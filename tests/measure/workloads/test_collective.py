"""Collective workload on 3 gloo ranks: results, sizes, skew of a late rank, and set-up times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs_systems.config import RunConfig
from cs_systems.core.collectives import COLLECTIVES, DIVIDED, ELEMENT_BYTES, CollectiveShape
from cs_systems.machine.device import Device
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.measure.workloads.collective import Collective
from tests.model.parallel.launch import launch
from tests.model.parallel.ranks import join

RANKS = 3
SIZE = 3 * 8 * 16
LATE_S = 0.5


def test_collective_without_a_call_is_an_error() -> None:
    workload = Collective.__new__(Collective)
    workload.shape = SimpleNamespace(collective="gather")  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="no call for the collective gather"):
        workload.call()


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run everything that the tests check, in processes started once."""
    join("gloo", rank, world_size, folder)
    device = Device(torch.device("cpu"))
    found: dict[str, Any] = {}
    for collective in COLLECTIVES:
        for dtype in ELEMENT_BYTES:
            found[f"{collective}-{dtype}"] = _tried(CollectiveShape(collective, SIZE, dtype), device)
        found[f"{collective}-late"] = _late(CollectiveShape(collective, SIZE, calls=5), device)
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _workload(shape: CollectiveShape, device: Device) -> Any:
    return Collective(Cell(RunConfig(workload="collective", collective=shape)), device)


def _tried(shape: CollectiveShape, device: Device) -> Any:
    """Return the result of one call, with the workload's description and tables."""
    try:
        workload = _workload(shape, device)
    except Unavailable as error:
        time.sleep(0.1)  # otherwise gloo's barrier may raise the error of this call again
        return str(error)
    rank, elements = torch.distributed.get_rank(), workload.sent.numel()
    workload.sent.copy_(torch.arange(elements) % 5 + 10 * rank)
    workload.call()
    return {**workload.describe(), **workload.tables(), "received": workload.received.double().tolist()}


def _late(shape: CollectiveShape, device: Device) -> Any:
    """Return the phases of steps that the last rank begins late."""
    workload = _workload(shape, device)
    original_step = workload.step

    def step() -> Iterator[tuple[str, Callable[[], Any]]]:
        is_last = torch.distributed.get_rank() == RANKS - 1
        yield "late", lambda: time.sleep(LATE_S if is_last else 0)
        yield from original_step()

    workload.step = step
    return [sample.phases_s for sample in measure(workload, device, warmup=0, steps=1)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("collectives")
    launch(run_rank, RANKS, folder, limit_s=50)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def given(rank: int, elements: int) -> list[float]:
    return [i % 5 + 10.0 * rank for i in range(elements)]


def expected(collective: str, elements: int, rank: int) -> list[float]:
    """Return the numbers that `rank` must receive by definition of the collective; `elements` counts the whole."""
    part = elements // RANKS
    own = slice(part * rank, part * (rank + 1))
    whole = [given(r, elements) for r in range(RANKS)]
    if collective == "all_gather":
        return [x for r in range(RANKS) for x in given(r, part)]
    if collective == "broadcast":
        return whole[0]
    if collective == "all_to_all":
        return [x for values in whole for x in values[own]]
    total = [sum(column) for column in zip(*whole, strict=True)]
    return total if collective == "all_reduce" else total[own]


NAMED = [f"{collective}-{dtype}" for collective in COLLECTIVES for dtype in ELEMENT_BYTES if dtype != "fp8"]


@pytest.mark.parametrize("name", NAMED)
def test_named_collective_runs(name: str, ranks: list[dict[str, Any]]) -> None:
    collective, dtype = name.split("-")
    elements = SIZE // ELEMENT_BYTES[dtype]
    for rank, found in enumerate(ranks):
        assert found[name]["received"] == expected(collective, elements, rank)


@pytest.mark.parametrize("name", NAMED)
def test_tensors_have_the_requested_bytes(name: str, ranks: list[dict[str, Any]]) -> None:
    collective = name.split("-")[0]
    part = SIZE // RANKS if collective in DIVIDED else SIZE
    whole = (part if collective == "all_gather" else SIZE, part if collective == "reduce_scatter" else SIZE)
    for found in ranks:
        assert (found[name]["sent_bytes"], found[name]["received_bytes"]) == whole


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_dtype_unsupported_by_gloo_is_unavailable(collective: str, ranks: list[dict[str, Any]]) -> None:
    reason = f"gloo does not support {collective} of fp8 (Invalid scalar type); choose another dtype"
    assert [found[f"{collective}-fp8"] for found in ranks] == [reason] * RANKS


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_late_rank_adds_skew_but_no_transfer(collective: str, ranks: list[dict[str, Any]]) -> None:
    """Only the other ranks wait, and the transfer is no longer than without the delay."""
    for number, found in enumerate(ranks):
        for phases in found[f"{collective}-late"]:
            assert list(phases) == ["late", "skew", "transfer"]
            assert (phases["skew"] > 0.9 * LATE_S) == (number != RANKS - 1)
            assert phases["transfer"] < 0.5 * LATE_S


def test_set_up_times_are_recorded_and_cpu_link_is_unknown(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        (setup,) = found["all_reduce-fp32"]["setup"]
        assert (setup["start_s"], setup["init_process_group_s"]) == (None, None)  # the test joined the ranks
        assert setup["new_group_s"] > 0
        assert setup["first_call_s"] > 0
        assert setup == ranks[0]["all_reduce-fp32"]["setup"][0]
        assert found["all_reduce-fp32"]["link"] == [{"peak_bytes_per_s": None, "source": None}]
