"""Tests of the times that a rank observes of its exchange with other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from cs_systems.machine.device import Device
from cs_systems.measure.recorder import rank_steps
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.rank_steps import RankSteps
from cs_systems.measure.recorder.replicas import Replicas
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.tracker import Tracker

LOOKING_S = 0.4


@pytest.fixture
def model() -> Iterator[DistributedDataParallel]:
    """Return a model with a buffer, on the only rank of a job."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    net = nn.Linear(8, 8)
    net.register_buffer("table", torch.zeros(8))
    yield DistributedDataParallel(net)
    dist.destroy_process_group()


def test_looking_at_the_stack_does_not_count_as_transfer(
    model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_lines(_: Any) -> Any:
        time.sleep(LOOKING_S)
        return None, None

    monkeypatch.setattr(rank_steps, "own_lines", slow_lines)
    device = Device(torch.device("cpu"))
    subject, meeting = Subject("loop", device, [model], [], None, 1), SimpleNamespace(rank=0)
    tracker = Tracker(device, time.perf_counter, lambda: None)
    ranks = RankSteps(subject, tracker, meeting, 1.0, Replicas())  # type: ignore[arg-type]
    ranks.begins(Period.FIRST)
    model(torch.ones(8, 8)).sum().backward()
    calls = {call.name: call.spans for call in ranks._calls}
    ranks.end()
    assert {*calls} == {"broadcast", "all_reduce"}
    assert all(device.between_s(begin, end) < LOOKING_S for spans in calls.values() for begin, end in spans)
